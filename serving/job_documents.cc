#include "serving/job_documents.h"

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "kvstore/remote/sweep.h"
#include "serving/status_details.h"

namespace carrel::serving {
namespace {

constexpr char kUnnamed[] = "doc-";
constexpr absl::Duration kComeAgain = absl::Seconds(10);

class JobDocuments final : public Documents {
 public:
  JobDocuments(const JobDocumentsConfig& config, std::unique_ptr<Documents> contexts,
               std::shared_ptr<JobFollower> jobs, std::shared_ptr<library::LoadedModel> model,
               Scheduler* scheduler)
      : config_(config),
        contexts_(std::move(contexts)),
        jobs_(std::move(jobs)),
        model_(std::move(model)),
        scheduler_(scheduler) {}

  ~JobDocuments() override { jobs_->Stop(); }

  absl::StatusOr<std::vector<Document>> List() override {
    ASSIGN_OR_RETURN(std::vector<Document> documents, contexts_->List());
    std::map<std::string, Document> all;
    for (const JobStatus& job : jobs_->All()) {
      if (Shows(job)) all[job.record.name] = DocumentOf(job);
    }
    for (Document& document : documents) all[document.name] = std::move(document);
    documents.clear();
    for (auto& [name, document] : all) documents.push_back(std::move(document));
    return documents;
  }

  absl::StatusOr<Document> Get(const std::string& name) override {
    absl::StatusOr<Document> document = contexts_->Get(name);
    if (!absl::IsNotFound(document.status())) return document;
    const std::optional<JobStatus> job = jobs_->Find(name);
    if (job.has_value() && Shows(*job)) return DocumentOf(*job);
    // The store has it once somebody asks it.
    const absl::StatusOr<kvstore::BoundName> bound = jobs_->bucket().ReadName(name);
    if (bound.ok()) return DocumentOf(*bound);
    return absl::IsNotFound(bound.status()) || absl::IsInvalidArgument(bound.status())
               ? document.status()
               : bound.status();
  }

  absl::StatusOr<Added> Add(const std::string& name, std::vector<TokenId> tokens,
                            Bringer by) override {
    RETURN_IF_ERROR(CheckDocumentLength(model_->checkpoint().config, tokens));
    const std::string digest = DigestOf(tokens);
    JobRecord record =
        RecordOf(name.empty() ? absl::StrCat(kUnnamed, digest.substr(0, 12)) : name, tokens, by);
    RETURN_IF_ERROR(WithParam(kvstore::ValidateContextName(record.name), "name"));
    ASSIGN_OR_RETURN(const std::optional<Document> there, FindThere(record.name, digest));
    if (there.has_value()) return Added{*there, /*existed=*/true};
    if (const int64_t queued = jobs_->queued(); queued >= config_.max_queued) {
      return WithRetryAfter(absl::ResourceExhaustedError(absl::StrCat(
                                queued, " documents wait for a worker already; come again later")),
                            kComeAgain);
    }
    Submitter submitter{.sees = by.sees, .place = std::move(by.place)};
    if (by.still != nullptr) {
      submitter.still = [still = std::move(by.still), of = record.name] { return still(of); };
    }
    const absl::StatusOr<JobBoard::Submitted> submitted =
        jobs_->Submit(record,
                      absl::string_view(reinterpret_cast<const char*>(tokens.data()),
                                        tokens.size() * sizeof(TokenId)),
                      std::move(submitter));
    if (absl::IsAlreadyExists(submitted.status())) {
      return WithCode(WithParam(submitted.status(), "name"), "context_exists");
    }
    RETURN_IF_ERROR(submitted.status());
    return Added{DocumentOf(submitted->status), submitted->existed};
  }

  absl::StatusOr<std::shared_ptr<void>> TakePlace(const Sees& counted, const Take& take) override {
    return contexts_->TakePlace(
        counted, [&](int64_t contexts, int64_t bytes) -> absl::StatusOr<std::shared_ptr<void>> {
          for (const JobRecord& record : jobs_->WithoutPlace()) {
            if (!counted(record.name)) continue;
            ++contexts;
            bytes += record.expected_bytes;
          }
          return take(contexts, bytes);
        });
  }

  absl::Status Delete(const std::string& name) override {
    const absl::StatusOr<JobStatus> job = jobs_->Remove(name, "cancelled");
    if (!job.ok() && !absl::IsNotFound(job.status())) return job.status();
    if (job.ok() && job->state == JobState::kCancelled) CountDocument("cancelled");
    if (job.ok() && job->state != JobState::kDone) return absl::OkStatus();
    // Also one that was done since it was looked at last.
    RETURN_IF_ERROR(scheduler_->Close(name));
    return kvstore::RemoveContext(jobs_->bucket(), name).status();
  }

  absl::Status Watch(const std::string& name, Watcher watcher) override {
    const absl::StatusOr<Document> there = Get(name);
    if (there.ok() && there->state == DocumentState::kReady) {
      watcher(*there);
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(there.status());
    return jobs_->Watch(name, [watcher = std::move(watcher)](const JobStatus& job) {
      return watcher(DocumentOf(job));
    });
  }

  std::optional<Recognised> Recognise(absl::Span<const TokenId> prompt, int64_t most_given_up,
                                      const Sees& sees) override {
    return contexts_->Recognise(prompt, most_given_up, sees);
  }
  absl::StatusOr<Added> Keep(const std::string& name, std::vector<TokenId> tokens,
                             Bringer by) override {
    return contexts_->Keep(name, std::move(tokens), std::move(by));
  }
  int64_t queued() const override { return jobs_->queued(); }

 private:
  static bool Shows(const JobStatus& job) { return job.state != JobState::kCancelled; }

  JobRecord RecordOf(const std::string& name, const std::vector<TokenId>& tokens,
                     const Bringer& by) const {
    return {.name = name,
            .model = config_.model_name,
            .fingerprint = FingerprintDigest(model_->checkpoint().fingerprint),
            .form = DocumentForm::kTokens,
            .index = config_.index,
            .owner = by.who,
            .tenant = by.tenant,
            .expected_bytes = ExpectedBytes(model_->checkpoint().config, std::ssize(tokens))};
  }

  // The same document under this name in the bucket, whoever brought it there.
  absl::StatusOr<std::optional<Document>> FindThere(const std::string& name,
                                                    const std::string& digest) const {
    const absl::StatusOr<std::optional<kvstore::BoundName>> bound =
        FindSameContext(jobs_->bucket(), name, digest, model_->checkpoint().fingerprint);
    if (absl::IsAlreadyExists(bound.status())) return AnotherDocuments(name);
    RETURN_IF_ERROR(bound.status());
    if (!bound->has_value()) return std::optional<Document>();
    return std::optional<Document>(DocumentOf(**bound));
  }

  static Document DocumentOf(const kvstore::BoundName& bound) {
    return {.name = bound.name,
            .state = DocumentState::kReady,
            .progress = 1,
            .tokens = bound.tokens,
            .bytes = bound.bytes,
            .content_id = bound.content_id,
            .created_unix_s = absl::ToUnixSeconds(bound.modified)};
  }
  static Document DocumentOf(const JobStatus& job) { return serving::DocumentOf(job); }

  const JobDocumentsConfig config_;
  const std::unique_ptr<Documents> contexts_;
  const std::shared_ptr<JobFollower> jobs_;
  const std::shared_ptr<library::LoadedModel> model_;
  Scheduler* const scheduler_;
};

}  // namespace

Document DocumentOf(const JobStatus& job) {
  const JobRecord& record = job.record;
  Document document{.name = record.name,
                    .index = record.index,
                    .created_unix_s = absl::ToUnixSeconds(record.submitted)};
  if (record.form == DocumentForm::kTokens) {
    document.tokens = record.document_bytes / static_cast<int64_t>(sizeof(TokenId));
  }
  switch (job.state) {
    case JobState::kQueued:
      break;
    case JobState::kRunning:
      document.state = DocumentState::kPrefilling;
      document.progress = job.lease.progress;
      document.where = job.lease.where;
      break;
    case JobState::kDone:
      document.state = DocumentState::kReady;
      document.progress = 1;
      document.tokens = job.end.tokens;
      document.bytes = job.end.bytes;
      document.content_id = job.end.content_id;
      break;
    case JobState::kCancelled:
      document.state = DocumentState::kFailed;
      document.error = absl::CancelledError(job.reason());
      break;
    case JobState::kDead:
      document.state = DocumentState::kFailed;
      document.error = absl::FailedPreconditionError(
          absl::StrCat("given up after ", job.end.tries, " tries: ", job.reason()));
  }
  return document;
}

std::unique_ptr<Documents> MakeJobDocuments(const JobDocumentsConfig& config,
                                            std::unique_ptr<Documents> contexts,
                                            std::shared_ptr<JobFollower> jobs,
                                            std::shared_ptr<library::LoadedModel> model,
                                            Scheduler* scheduler) {
  return std::make_unique<JobDocuments>(config, std::move(contexts), std::move(jobs),
                                        std::move(model), scheduler);
}

}  // namespace carrel::serving
