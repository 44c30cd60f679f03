#include "serving/jobs/prefill_runner.h"

#include <spdlog/spdlog.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/format/manifest.h"
#include "kvstore/remote/push.h"
#include "kvstore/storage/context_export.h"
#include "prefill/prefill.h"

namespace carrel::serving {
namespace {

constexpr absl::string_view kMine = "job-";
// Of a job's progress: prefill, and then what is sent.
constexpr double kComputing = 0.95;

std::string NameOf(const std::string& id) { return absl::StrCat(kMine, id); }

std::string BytesOf(const std::vector<TokenId>& tokens) {
  return std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(TokenId));
}

absl::StatusOr<prefill::PrefillConfig> ConfigOf(const PrefillRunnerConfig& runner,
                                                const JobRecord& record) {
  prefill::PrefillConfig config;
  config.store_folder = runner.folder;
  config.name = NameOf(record.id);
  config.device = runner.device;
  config.gpu_memory = runner.gpu_memory;
  if (record.index == "auto") {
    config.auto_index = kvstore::AutoIndexConfig();
  } else {
    ASSIGN_OR_RETURN(config.index.kind, kvstore::ParseIndexKind(record.index));
  }
  return config;
}

// Makes the context in the store, unless it is there, and publishes it in the bucket.
absl::StatusOr<JobResult> MakeInBucket(prefill::PrefillConfig config,
                                       const model::Checkpoint& checkpoint,
                                       const std::vector<TokenId>& tokens, kvstore::Store& store,
                                       ThreadPool* pool, const kvstore::Bucket& bucket,
                                       const std::string& name, const JobControl& control) {
  config.wanted = [&] { return control.still().ok(); };
  Progress progress(
      [&](double share, const std::string& where) { control.tell(kComputing * share, where); });
  if (!store.GetManifest(config.name).ok()) {
    const auto run = [&] {
      return prefill::RunPrefill(config, checkpoint, tokens, store, pool, progress);
    };
    absl::StatusOr<prefill::PrefillReport> report = run();
    if (absl::IsFailedPrecondition(report.status()) && !config.restart) {
      config.restart = true;  // layers of another version of the model, or of the program
      report = run();
    }
    RETURN_IF_ERROR(control.still());
    RETURN_IF_ERROR(report.status());
  }
  ASSIGN_OR_RETURN(const v1::Manifest manifest, store.GetManifest(config.name));
  ASSIGN_OR_RETURN(const kvstore::ContextId id, kvstore::ContextIdOf(manifest));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextExport> from, store.Export(config.name));
  kvstore::PushOptions options;
  options.still = control.still;
  ASSIGN_OR_RETURN(
      const kvstore::Pushed pushed,
      kvstore::PushContext(
          bucket, *from, name,
          [&](int64_t sent, int64_t of) {
            const double share = of > 0 ? static_cast<double>(sent) / static_cast<double>(of) : 0;
            control.tell(kComputing + (1 - kComputing) * share, "sending it to the bucket");
          },
          options));
  return JobResult{.content_id = pushed.content_id,
                   .context_id = id.ToString(),
                   .bytes = pushed.bytes,
                   .tokens = manifest.tokens(),
                   .was_there = pushed.was_there};
}

}  // namespace

class PrefillRunner::Prepared final : public PreparedJob {
 public:
  Prepared(PrefillRunner& runner, const RunnableModel& model, JobRecord record,
           std::vector<TokenId> tokens)
      : runner_(runner), model_(model), record_(std::move(record)), tokens_(std::move(tokens)) {}

  std::string token_ids_sha256() const override { return Sha256Hex(BytesOf(tokens_)); }
  std::vector<std::pair<std::string, std::string>> fingerprint() const override {
    return model_.checkpoint->fingerprint;
  }
  absl::StatusOr<JobResult> Run(const JobControl& control) override {
    ASSIGN_OR_RETURN(prefill::PrefillConfig config, ConfigOf(runner_.config_, record_));
    if (!record_.raw && model_.probe != nullptr) config.probe = model_.probe(tokens_);
    DropUnlessThisOne();
    return MakeInBucket(std::move(config), *model_.checkpoint, tokens_, *runner_.store_,
                        runner_.pool_, runner_.bucket_, record_.name, control);
  }

 private:
  // A context that was computed by weights of the same name that are others now is of no use.
  void DropUnlessThisOne() const {
    const absl::StatusOr<v1::Manifest> there = runner_.store_->GetManifest(NameOf(record_.id));
    if (there.ok() && !IsOf(*there, token_ids_sha256(), fingerprint())) {
      runner_.Drop(NameOf(record_.id));
    }
  }

  PrefillRunner& runner_;
  const RunnableModel& model_;
  const JobRecord record_;
  const std::vector<TokenId> tokens_;
};

absl::StatusOr<std::unique_ptr<PrefillRunner>> PrefillRunner::Create(
    const PrefillRunnerConfig& config, const kvstore::Bucket& bucket,
    std::vector<RunnableModel> models, ThreadPool* pool) {
  for (size_t i = 0; i < models.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      if (models[i].name != models[k].name) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("two models are called ", models[i].name, ": jobs name one by it"));
    }
  }
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(config.folder, kvstore::StoreMode::kReadWrite));
  return std::unique_ptr<PrefillRunner>(
      new PrefillRunner(config, bucket, std::move(models), pool, std::move(store)));
}

const RunnableModel* PrefillRunner::Find(const JobRecord& record) const {
  for (const RunnableModel& model : models_) {
    const bool fits = record.fingerprint.empty()
                          ? model.name == record.model
                          : FingerprintDigest(model.checkpoint->fingerprint) == record.fingerprint;
    if (fits) return &model;
  }
  return nullptr;
}

bool PrefillRunner::Fits(const JobRecord& record) const { return Find(record) != nullptr; }

absl::StatusOr<std::unique_ptr<PreparedJob>> PrefillRunner::Prepare(const JobRecord& record,
                                                                    std::string document) {
  const RunnableModel* const model = Find(record);
  if (model == nullptr) {
    return absl::InternalError(absl::StrCat("no model here fits job ", record.id));
  }
  std::vector<TokenId> tokens;
  if (record.form == DocumentForm::kTokens) {
    tokens.resize(document.size() / sizeof(TokenId));
    std::memcpy(tokens.data(), document.data(), tokens.size() * sizeof(TokenId));
    RETURN_IF_ERROR(model::ValidateTokenIds(tokens, model->checkpoint->config));
  } else {
    ASSIGN_OR_RETURN(tokens, model->encode(document, record.raw, record.drop_missing));
  }
  return std::make_unique<Prepared>(*this, *model, record, std::move(tokens));
}

void PrefillRunner::Drop(const std::string& name) {
  const absl::Status dropped = store_->Delete(name);
  if (!dropped.ok() && !absl::IsNotFound(dropped)) {
    spdlog::warn("what the folder has of {} stays: {}", name, std::string(dropped.message()));
  }
}

void PrefillRunner::Forget(const JobRecord& record) { Drop(NameOf(record.id)); }

absl::Status PrefillRunner::Tidy(JobBoard& board) {
  std::vector<std::string> names;
  std::vector<absl::Status> unreadable;
  ASSIGN_OR_RETURN(const std::vector<v1::Manifest> made, store_->List(&unreadable));
  for (const v1::Manifest& manifest : made) names.push_back(manifest.name());
  ASSIGN_OR_RETURN(const std::vector<kvstore::UnfinishedPrefill> left, store_->ListUnfinished());
  for (const kvstore::UnfinishedPrefill& one : left) names.push_back(one.name);
  for (const std::string& name : names) {
    absl::string_view id = name;
    if (!absl::ConsumePrefix(&id, kMine) || !IsJobId(id)) continue;
    const absl::StatusOr<JobStatus> job = board.Get(std::string(id));
    if (!job.ok() && !absl::IsNotFound(job.status())) return job.status();
    if (!job.ok() || job->ended()) Drop(name);
  }
  return absl::OkStatus();
}

}  // namespace carrel::serving
