#include "http_api/documents.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "carrel/prefill.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/resource_status.h"
#include "common/status.h"
#include "common/thrown.h"
#include "http_api/api_error.h"
#include "http_api/api_metrics.h"
#include "http_api/known_prefixes.h"
#include "http_api/waiting_documents.h"
#include "kvstore/access/kept_name.h"
#include "kvstore/format/context_name.h"
#include "kvstore/service/context_client.h"
#include "library/handles.h"
#include "library/status.h"

namespace carrel::http_api {
namespace {

constexpr char kUnnamed[] = "doc-";
constexpr size_t kMaxFailed = 64;  // whose errors are remembered
// How old a look at a store may be that others write to.
constexpr absl::Duration kLookAgain = absl::Seconds(2);

class PrefillingDocuments final : public Documents {
 public:
  PrefillingDocuments(DocumentsConfig config, std::shared_ptr<library::LoadedModel> model,
                      std::shared_ptr<library::StoreAccess> store, Answerer* answerer)
      : config_(std::move(config)),
        model_(std::move(model)),
        store_(std::move(store)),
        answerer_(answerer),
        model_handle_(model_),
        store_handle_(config_.address, store_),
        waiting_(config_.address.folder) {}

  // Goes on with what another process left, and takes in more from now on.
  absl::Status Begin() {
    if (!config_.writable) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::vector<WaitingDocuments::Found> left, waiting_.Read());
    for (const WaitingDocuments::Found& one : left) RETURN_IF_ERROR(GoOn(one));
    RETURN_IF_ERROR(Sweep());
    thread_ = std::thread([this] { Work(); });
    return absl::OkStatus();
  }

  ~PrefillingDocuments() override {
    stopping_ = true;
    {
      absl::MutexLock lock(&mu_);  // whoever waits looks again
    }
    if (thread_.joinable()) thread_.join();
    absl::MutexLock lock(&mu_);
    for (const auto& [name, job] : jobs_) {
      if (job->document.state == DocumentState::kFailed) continue;
      Fail(*job, absl::UnavailableError("the server is stopping"));
    }
  }

  // Reads what the store has that is not known yet.
  absl::Status Refresh() {
    absl::MutexLock one(&refresh_mu_);
    ASSIGN_OR_RETURN(const auto client, store_->NewContextClient());
    ASSIGN_OR_RETURN(const v1::ListResponse listed, client->List());
    std::map<std::string, Stored> stored;
    for (const auto& summary : listed.contexts()) {
      Stored& entry = stored[summary.name()];
      {
        absl::MutexLock lock(&mu_);
        const auto known = stored_.find(summary.name());
        if (known != stored_.end() && known->second.document.content_id == summary.content_id()) {
          entry = known->second;
          continue;
        }
      }
      RETURN_IF_ERROR(LookAt(summary, *client, entry));
    }
    absl::MutexLock lock(&mu_);
    if (const auto going = current_ != nullptr && current_->cancelled
                               ? stored.find(current_->document.name)
                               : stored.end();
        going != stored.end()) {
      prefixes_.Remove(going->second.document.content_id);
      stored.erase(going);
    }
    for (const auto& [name, entry] : stored_) {
      const auto still = stored.find(name);
      if (still == stored.end() || still->second.document.content_id != entry.document.content_id) {
        prefixes_.Remove(entry.document.content_id);
      } else {
        still->second.used = entry.used;
      }
    }
    stored_ = std::move(stored);
    looked_ = absl::Now();
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<Document>> List() override {
    RETURN_IF_ERROR(Refresh());
    absl::MutexLock lock(&mu_);
    std::map<std::string, Document> all;
    for (const auto& [name, entry] : stored_) all[name] = entry.document;
    for (const auto& [name, job] : jobs_) all[name] = job->document;
    std::vector<Document> documents;
    for (auto& [name, document] : all) documents.push_back(std::move(document));
    return documents;
  }

  absl::StatusOr<Document> Get(const std::string& name) override {
    RETURN_IF_ERROR(Refresh());
    absl::MutexLock lock(&mu_);
    return FindLocked(name);
  }

  absl::StatusOr<Added> Add(const std::string& name, std::vector<TokenId> tokens,
                            std::shared_ptr<void> place, const Sees& sees) override {
    return Enqueue(name, /*waits=*/true, std::move(tokens), std::move(place), sees);
  }

  absl::StatusOr<std::shared_ptr<void>> TakePlace(const Sees& counted, const Take& take) override {
    RETURN_IF_ERROR(Refresh());
    const AttentionShape& shape = model_->checkpoint().config.shape;
    const int64_t token_bytes = int64_t{4} * shape.layers * shape.kv_heads * shape.head_dim;
    absl::MutexLock lock(&mu_);
    int64_t contexts = 0, bytes = 0;
    for (const auto& [name, entry] : stored_) {
      if (!counted(name)) continue;
      ++contexts;
      bytes += entry.document.bytes;
    }
    for (const auto& [name, job] : jobs_) {
      const bool counts = job->place == nullptr && !stored_.contains(name) &&
                          job->document.state != DocumentState::kFailed && counted(name);
      if (!counts) continue;
      ++contexts;
      bytes += job->document.tokens * token_bytes;
    }
    return take(contexts, bytes);
  }

  absl::Status Delete(const std::string& name) override {
    RETURN_IF_ERROR(CheckWritable());
    {
      absl::MutexLock waiting(&waiting_mu_);
      absl::MutexLock lock(&mu_);
      if (const auto found = jobs_.find(name); found != jobs_.end()) {
        RETURN_IF_ERROR(waiting_.Remove(name));  // or it would come back
        const std::shared_ptr<Job> job = found->second;
        jobs_.erase(found);
        std::erase(queue_, job);
        job->cancelled = true;  // the thread that prefills it discards what there is,
        if (const auto entry = stored_.find(name); entry != stored_.end()) {  // be it published
          prefixes_.Remove(entry->second.document.content_id);
          stored_.erase(entry);
        }
        job->place = nullptr;
        const bool ended = job->document.state == DocumentState::kFailed;
        if (!ended) {
          Fail(*job, absl::CancelledError("cancelled"));
          CountDocument("cancelled");
        }
        if (current_ == job) return absl::OkStatus();
        if (current_ == nullptr || current_->document.name != name) {
          return library::FromPublic(DiscardPrefill(store_handle_, name));
        }
        return absl::OkStatus();
      }
    }
    RETURN_IF_ERROR(DeleteStored(name));
    return Refresh();
  }

  absl::Status Watch(const std::string& name, Watcher watcher) override {
    absl::MutexLock lock(&mu_);
    ASSIGN_OR_RETURN(const Document document, FindLocked(name));
    const bool more = watcher(document);
    const auto job = jobs_.find(name);
    if (more && job != jobs_.end()) job->second->watchers.push_back(std::move(watcher));
    return absl::OkStatus();
  }

  std::optional<Recognised> Recognise(absl::Span<const TokenId> prompt, int64_t most_given_up,
                                      const Sees& sees) override {
    bool old;
    {
      absl::MutexLock lock(&mu_);
      old = !config_.writable && absl::Now() - looked_ > kLookAgain;
    }
    if (old && !Refresh().ok()) return std::nullopt;
    std::vector<Recognised> candidates;
    {
      absl::MutexLock lock(&mu_);
      for (const std::string& content_id : prefixes_.Candidates(prompt)) {
        for (const auto& [name, entry] : stored_) {
          if (entry.document.content_id == content_id) candidates.push_back({name, content_id, {}});
        }
      }
    }
    for (Recognised& candidate : candidates) {
      if (!sees(candidate.name)) continue;
      const auto tokens = store_->DocumentTokens(candidate.name, candidate.content_id);
      if (!tokens.ok()) continue;  // it is gone, or damaged: who asks for it by name is told
      auto rest = RestOf(prompt, *tokens, most_given_up);
      if (!rest.has_value()) continue;
      candidate.prompt = *std::move(rest);
      absl::MutexLock lock(&mu_);
      if (const auto entry = stored_.find(candidate.name); entry != stored_.end()) {
        entry->second.used = absl::Now();
      }
      return std::move(candidate);
    }
    return std::nullopt;
  }

  absl::StatusOr<Added> Keep(const std::string& name, std::vector<TokenId> tokens,
                             std::shared_ptr<void> place, const Sees& sees) override {
    RETURN_IF_ERROR(CheckLength(tokens));
    RETURN_IF_ERROR(Refresh());
    {
      absl::MutexLock lock(&mu_);
      const auto same = SameLocked(DigestOf(tokens), "", sees);
      if (same.has_value()) return Added{*same, /*existed=*/true};
    }
    RETURN_IF_ERROR(MakeRoom(name));
    return Enqueue(name, /*waits=*/false, std::move(tokens), std::move(place), sees);
  }

  int64_t queued() const override {
    absl::MutexLock lock(&mu_);
    return static_cast<int64_t>(queue_.size());
  }

 private:
  struct Stored {
    Document document;
    std::string digest;  // of its tokens
    absl::Time used;
  };
  struct Job {
    Document document;  // under mu_
    std::string digest;
    std::vector<TokenId> tokens;
    std::vector<Watcher> watchers;       // under mu_
    std::atomic<bool> cancelled{false};  // set under mu_
    std::shared_ptr<void> place;         // in a quota; under mu_
    bool published = false;              // of the thread that prefills
    bool waits = false;                  // in a file, too
  };

  absl::Status CheckWritable() const {
    if (config_.writable) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "documents are taken in and deleted by a process that has the store to itself: "
        "carrel api --store FOLDER, without --read-only");
  }

  absl::Status LookAt(const v1::ListResponse::Summary& summary, kvstore::ContextClient& client,
                      Stored& entry) {
    Document& document = entry.document;
    document = {.name = summary.name(),
                .state = DocumentState::kReady,
                .progress = 1,
                .tokens = summary.tokens(),
                .bytes = summary.bytes(),
                .content_id = summary.content_id(),
                .index = summary.index_kind(),
                .created_unix_s = summary.created_unix_s()};
    entry.used = absl::FromUnixSeconds(summary.created_unix_s());
    const absl::StatusOr<v1::Manifest> manifest = client.Get(summary.name());
    if (absl::IsNotFound(manifest.status())) return absl::OkStatus();  // deleted meanwhile
    RETURN_IF_ERROR(manifest.status());
    entry.digest = manifest->token_ids_sha256();
    std::vector<std::pair<std::string, std::string>> fingerprint;
    for (const auto& field : manifest->fingerprint().fields()) {
      fingerprint.emplace_back(field.name(), field.value());
    }
    document.usable = fingerprint == model_->checkpoint().fingerprint;
    if (!document.usable || document.content_id.empty()) return absl::OkStatus();
    const auto tokens = store_->DocumentTokens(document.name, document.content_id);
    if (absl::IsUnavailable(tokens.status()) || absl::IsResourceExhausted(tokens.status())) {
      return tokens.status();  // of a server: it is looked at again
    }
    // Damaged, replaced meanwhile, or not ours to read: by its name alone.
    if (!tokens.ok()) return absl::OkStatus();
    absl::MutexLock lock(&mu_);
    prefixes_.Remove(document.content_id);
    prefixes_.Add(document.content_id, *tokens);
    return absl::OkStatus();
  }

  absl::StatusOr<Document> FindLocked(const std::string& name) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (const auto job = jobs_.find(name); job != jobs_.end()) return job->second->document;
    if (const auto entry = stored_.find(name); entry != stored_.end())
      return entry->second.document;
    return absl::NotFoundError(absl::StrCat("no context \"", name, "\""));
  }

  // The same document, ready or on its way.
  std::optional<Document> SameLocked(const std::string& digest, const std::string& name,
                                     const Sees& sees) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::optional<Document> found;
    const auto look = [&](const std::string& its_digest, const Document& document) {
      if (its_digest != digest || !document.usable || !sees(document.name)) return;
      if (!found.has_value() || document.name == name) found = document;
    };
    for (const auto& [key, job] : jobs_) {
      if (job->document.state != DocumentState::kFailed) look(job->digest, job->document);
    }
    for (const auto& [key, entry] : stored_) look(entry.digest, entry.document);
    return found;
  }

  absl::Status CheckLength(const std::vector<TokenId>& tokens) const {
    const model::ModelConfig& config = model_->checkpoint().config;
    const int64_t most = config.MaxTokens();
    if (tokens.empty()) return absl::InvalidArgumentError("text: the document is empty");
    if (static_cast<int64_t>(tokens.size()) < most) return absl::OkStatus();
    return WithCode(
        WithParam(absl::InvalidArgumentError(absl::StrCat(
                      "text: the document has ", tokens.size(),
                      " tokens: must be fewer than the model's ", most, " (",
                      config.MaxTokensField(), "), which question and answer are among")),
                  "text"),
        kContextLengthExceeded);
  }

  // What another process left waiting. What cannot go on has failed, and says why.
  absl::Status GoOn(const WaitingDocuments::Found& found) {
    auto job = std::make_shared<Job>();
    job->document = {.name = found.name, .index = config_.index};
    job->waits = true;
    absl::Status good = found.document.status();
    if (good.ok()) {
      job->tokens = found.document->tokens;
      job->digest = DigestOf(job->tokens);
      job->document.tokens = static_cast<int64_t>(job->tokens.size());
      job->document.created_unix_s = found.document->created_unix_s;
      good = CheckLength(job->tokens);
      if (found.document->fingerprint != model_->checkpoint().fingerprint) {
        good = absl::FailedPreconditionError(
            "it was brought under another model than the one that is served now: delete it, or "
            "bring it again");
      }
    }
    absl::MutexLock lock(&mu_);
    if (const auto entry = stored_.find(found.name);
        good.ok() && entry != stored_.end() && entry->second.digest == job->digest) {
      return waiting_.Remove(found.name);  // published, as the process ended
    }
    if (stored_.contains(found.name) && good.ok()) {
      good = absl::AlreadyExistsError(
          absl::StrCat("name=", found.name, " is another document's by now"));
    }
    jobs_[found.name] = job;
    if (good.ok()) {
      queue_.push_back(job);
    } else {
      Fail(*job, good);
    }
    return absl::OkStatus();
  }

  // Prefills of this store that ended in the middle. What was kept unasked, or is published by now, goes;
  // others are listed: they may be somebody's who goes on with them.
  absl::Status Sweep() {
    if (store_->store() == nullptr) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::vector<kvstore::UnfinishedPrefill> left,
                     store_->store()->ListUnfinished());
    for (const kvstore::UnfinishedPrefill& one : left) {
      if (one.running) continue;
      const std::string& name = one.name;
      bool discard = kvstore::IsKept(name);
      {
        absl::MutexLock lock(&mu_);
        const auto job = jobs_.find(name);
        if (job != jobs_.end() && job->second->document.state != DocumentState::kFailed) continue;
        discard |= job != jobs_.end() || stored_.contains(name);
        if (!discard) {
          const auto failed = std::make_shared<Job>();
          failed->document = {.name = name, .index = config_.index};
          jobs_[name] = failed;
          Fail(*failed,
               absl::FailedPreconditionError(
                   "a prefill that did not end: carrel prefill with the same name and text goes "
                   "on with it, while no server has the store; or delete it"));
        }
      }
      if (discard) RETURN_IF_ERROR(library::FromPublic(DiscardPrefill(store_handle_, name)));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Added> Enqueue(std::string name, bool waits, std::vector<TokenId> tokens,
                                std::shared_ptr<void> place, const Sees& sees) {
    RETURN_IF_ERROR(CheckWritable());
    RETURN_IF_ERROR(CheckLength(tokens));
    auto job = std::make_shared<Job>();
    job->digest = DigestOf(tokens);
    const bool named = !name.empty();
    if (!named) name = absl::StrCat(kUnnamed, job->digest.substr(0, 12));
    RETURN_IF_ERROR(WithParam(kvstore::ValidateContextName(name), "name"));
    RETURN_IF_ERROR(Refresh());
    absl::MutexLock waiting(&waiting_mu_);
    {
      absl::MutexLock lock(&mu_);
      ASSIGN_OR_RETURN(const std::optional<Document> same,
                       CheckPlaceLocked(name, named, job->digest, sees));
      if (same.has_value()) return Added{*same, /*existed=*/true};
    }
    job->document = {.name = name,
                     .tokens = static_cast<int64_t>(tokens.size()),
                     .index = config_.index,
                     .created_unix_s = absl::ToUnixSeconds(absl::Now())};
    job->tokens = std::move(tokens);
    job->place = std::move(place);
    job->waits = waits;
    if (job->waits) {
      RETURN_IF_ERROR(OfDisk(waiting_.Put({.name = name,
                                           .tokens = job->tokens,
                                           .fingerprint = model_->checkpoint().fingerprint,
                                           .created_unix_s = job->document.created_unix_s})));
    }
    absl::MutexLock lock(&mu_);
    jobs_[name] = job;
    queue_.push_back(job);
    return Added{job->document};
  }

  // The same document, if it is there; else whether there is room for it under this name.
  absl::StatusOr<std::optional<Document>> CheckPlaceLocked(const std::string& name, bool named,
                                                           const std::string& digest,
                                                           const Sees& sees) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (auto same = SameLocked(digest, name, sees); same.has_value()) {
      if (!named || same->name == name) return same;
      return WithCode(
          WithParam(absl::AlreadyExistsError(absl::StrCat(
                        "name=", name, ": the same text is context \"", same->name,
                        "\" already: ask that one, or delete it first; it is read once")),
                    "name"),
          "context_exists");
    }
    if (const auto there = jobs_.find(name);
        stored_.contains(name) ||
        (there != jobs_.end() && there->second->document.state != DocumentState::kFailed)) {
      return WithParam(
          absl::AlreadyExistsError(absl::StrCat(
              "name=", name, " is another document's: delete that one, or choose another")),
          "name");
    }
    if (static_cast<int64_t>(queue_.size()) >= config_.max_queued) {
      return WithRetryAfter(
          absl::ResourceExhaustedError(
              absl::StrCat(queue_.size(), " documents wait for prefill already; come again later")),
          absl::Seconds(10));
    }
    return std::nullopt;
  }

  // Of contexts that were kept unasked for the same one, so many may be there that one more fits.
  absl::Status MakeRoom(const std::string& kept_name) {
    for (;;) {
      std::string oldest;
      {
        absl::MutexLock lock(&mu_);
        int64_t kept = 0;
        absl::Time used = absl::InfiniteFuture();
        for (const auto& [name, job] : jobs_) kept += kvstore::SameKeeper(name, kept_name);
        for (const auto& [name, entry] : stored_) {
          if (!kvstore::SameKeeper(name, kept_name) || jobs_.contains(name)) continue;
          ++kept;
          if (entry.used < used) {
            used = entry.used;
            oldest = name;
          }
        }
        if (kept < config_.keep) return absl::OkStatus();
      }
      if (oldest.empty()) return absl::ResourceExhaustedError("as many are being kept as may");
      RETURN_IF_ERROR(DeleteStored(oldest));
      RETURN_IF_ERROR(Refresh());
    }
  }

  absl::Status DeleteStored(const std::string& name) {
    RETURN_IF_ERROR(answerer_->Close(name));
    ASSIGN_OR_RETURN(const auto client, store_->NewContextClient());
    // A session that was just closed may not be gone yet.
    const absl::Time until = absl::Now() + absl::Seconds(2);
    for (;;) {
      const absl::Status deleted = client->Delete(name);
      if (!absl::IsFailedPrecondition(deleted) || absl::Now() > until) return deleted;
      absl::SleepFor(absl::Milliseconds(20));
    }
  }

  void Tell(Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    std::erase_if(job.watchers, [&](const Watcher& watcher) {
      // One that throws has seen enough; the others are told all the same.
      const auto more =
          CatchThrown("a watcher", [&]() -> absl::StatusOr<bool> { return watcher(job.document); });
      return !more.value_or(false);
    });
  }

  void Fail(Job& job, const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    job.document.state = DocumentState::kFailed;
    job.document.error = error;
    Tell(job);
    job.watchers.clear();
  }

  void Work() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        absl::MutexLock lock(&mu_);
        const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
          return stopping_ || !queue_.empty();
        };
        mu_.Await(absl::Condition(&ready));
        if (stopping_) return;
        job = queue_.front();
        queue_.pop_front();
        current_ = job;
        job->document.state = DocumentState::kPrefilling;
        Tell(*job);
      }
      const absl::Status status =
          OfDisk(CatchThrown("a document", [&] { return PrefillOne(*job); }));
      if (!status.ok() && !stopping_ && !job->published) Discard(*job);  // it leaves nothing behind
      Forget(*job, status);
      {
        absl::MutexLock lock(&mu_);
        if (!job->cancelled) {
          current_ = nullptr;
          End(*job, status);
          continue;
        }
      }
      Discard(*job);
      absl::MutexLock one(&refresh_mu_);  // whoever looks now may have listed it
      absl::MutexLock lock(&mu_);
      current_ = nullptr;
    }
  }

  // Its file goes once it is ready, becomes its error if it has failed, and stays where the process ends in
  // between. Who cancelled it has removed the file, and another may have the name.
  void Forget(const Job& job, const absl::Status& status) {
    absl::MutexLock waiting(&waiting_mu_);
    if (!job.waits || job.cancelled || (stopping_ && !job.published)) return;
    // One that stays although it was published goes at the next start.
    const absl::Status done = status.ok() ? waiting_.Remove(job.document.name)
                                          : waiting_.PutFailure(job.document.name, status);
    if (!done.ok()) spdlog::warn("document {}: {}", job.document.name, std::string(done.message()));
  }

  // What was cancelled goes, wherever it had come to; nobody sees it meanwhile.
  void Discard(const Job& job) {
    if (!job.published) {
      (void)DiscardPrefill(store_handle_, job.document.name);
      return;
    }
    // Somebody may have been answered from it before it was cancelled.
    while (absl::IsFailedPrecondition(DeleteStored(job.document.name)) && !stopping_) {
      absl::SleepFor(absl::Milliseconds(100));
    }
  }

  absl::Status PrefillOne(Job& job) {
    PrefillOptions options;
    options.index = config_.index;
    options.device = config_.on_gpu ? Device::kCuda : Device::kCpu;
    options.progress = [&](double share, const std::string& where) {
      absl::MutexLock lock(&mu_);
      if (job.cancelled) return;
      job.document.progress = share;
      job.document.where = where;
      Tell(job);
      for (const auto& waiting : queue_) Tell(*waiting);  // whose watchers look at the clock
    };
    options.wanted = [&] { return !job.cancelled && !stopping_; };
    const std::string name = job.document.name;
    auto run = [&] { return Prefill(model_handle_, job.tokens, store_handle_, name, options); };
    Result<PrefillReport> report = run();
    if (report.status().code() == StatusCode::kFailedPrecondition && options.wanted()) {
      options.restart = true;  // what lay there under the name was another document's
      report = run();
    }
    RETURN_IF_ERROR(library::FromPublic(report.status()));
    job.published = true;
    return job.cancelled ? absl::OkStatus() : Refresh();
  }

  void End(Job& job, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    job.tokens = {};
    const std::string name = job.document.name;
    CountDocument(status.ok() ? "ready" : "failed");
    job.place = nullptr;  // it is listed, or there is none
    if (!status.ok()) {
      if (!stopping_) spdlog::error("document {}: {}", name, std::string(status.message()));
      Fail(job, stopping_ ? absl::UnavailableError("the server is stopping") : status);
      if (!job.waits) jobs_.erase(name);  // nobody asked for it
      return DropFailures();
    }
    if (const auto entry = stored_.find(name); entry != stored_.end()) {
      entry->second.used = absl::Now();
      job.document = entry->second.document;
    }
    Tell(job);
    jobs_.erase(name);
  }

  void DropFailures() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    size_t failed = 0;
    for (auto it = jobs_.begin(); it != jobs_.end();) {
      const bool drop =
          it->second->document.state == DocumentState::kFailed && ++failed > kMaxFailed;
      if (drop) waiting_.Remove(it->first).IgnoreError();  // its error
      it = drop ? jobs_.erase(it) : std::next(it);
    }
  }

  // A full disk is the server's error, and no matter of how often one comes.
  static absl::Status OfDisk(absl::Status status) {
    if (!IsDiskFull(status)) return status;
    return WithHttpStatus(std::move(status), 507);
  }

  const DocumentsConfig config_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
  Answerer* const answerer_;
  library::ModelHandle model_handle_;
  library::StoreHandle store_handle_;
  std::atomic<bool> stopping_{false};
  const WaitingDocuments waiting_;
  absl::Mutex waiting_mu_ ABSL_ACQUIRED_BEFORE(mu_);  // held where files of `waiting_` change
  absl::Mutex refresh_mu_ ABSL_ACQUIRED_BEFORE(mu_);  // one look at the store at a time
  mutable absl::Mutex mu_;
  std::map<std::string, Stored> stored_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::shared_ptr<Job>> jobs_ ABSL_GUARDED_BY(mu_);  // not ready
  std::deque<std::shared_ptr<Job>> queue_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Job> current_ ABSL_GUARDED_BY(mu_);
  KnownPrefixes prefixes_ ABSL_GUARDED_BY(mu_);  // by content id
  absl::Time looked_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::thread thread_;
};

}  // namespace

std::string DigestOf(const std::vector<TokenId>& tokens) {
  return Sha256Hex(absl::string_view(reinterpret_cast<const char*>(tokens.data()),
                                     tokens.size() * sizeof(TokenId)));
}

absl::Status BeingRead(const Document& document) {
  const bool queued = document.state == DocumentState::kQueued;
  const std::string how = queued
                              ? "waits to be read"
                              : absl::StrFormat("is being read, %.0f%%", 100 * document.progress);
  return WithCode(
      WithRetryAfter(absl::UnavailableError(absl::StrCat(
                         "context \"", document.name, "\" ", how,
                         ": come again, or say \"wait\": SECONDS, at most 600, to wait for it")),
                     absl::Seconds(queued ? 10 : 3)),
      "context_not_ready");
}

absl::StatusOr<std::unique_ptr<Documents>> Documents::Create(
    const DocumentsConfig& config, std::shared_ptr<library::LoadedModel> model,
    std::shared_ptr<library::StoreAccess> store, Answerer* answerer) {
  auto documents =
      std::make_unique<PrefillingDocuments>(config, std::move(model), std::move(store), answerer);
  const absl::Status looked = documents->Refresh();
  if (!looked.ok() && config.address.server.empty()) return looked;  // a server may come later
  RETURN_IF_ERROR(documents->Begin());
  return documents;
}

}  // namespace carrel::http_api
