// What:   jobs by prefill: a document through a model that this process holds, into a folder of its own, and from
//         there into the bucket.
// Restart: what was computed of a job stays in the folder until the job has ended, and is gone on with, after its
//         last finished layer, by whichever try comes to this folder again.
// Errors: as job_runner.h; InvalidArgument tokens that the model does not have; those of prefill.h and push.h.
// Ownership: bucket, and what models refer to, outlive it.
// Threads: one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "kvstore/remote/bucket.h"
#include "kvstore/storage/store.h"
#include "model/checkpoint.h"
#include "model/device.h"
#include "serving/jobs/job_board.h"
#include "serving/jobs/job_runner.h"

namespace carrel::serving {

// A model as jobs call it.
struct RunnableModel {
  std::string name;
  const model::Checkpoint* checkpoint = nullptr;
  // A text as the tokens of a document. raw: not inside a chat's turn. drop: bytes without a token are left out.
  std::function<absl::StatusOr<std::vector<TokenId>>(const std::string& text, bool raw, bool drop)>
      encode;
  // What may come behind the document (PrefillConfig::probe); null: plain questions. raw: as of encode.
  std::function<std::vector<TokenId>(absl::Span<const TokenId> document)> probe;
};

struct PrefillRunnerConfig {
  std::string folder;  // of the store where contexts are made
  model::Device device = model::Device::kCpu;
  int64_t gpu_memory = model::kAllGpuMemory;
};

class PrefillRunner final : public JobRunner {
 public:
  // Takes the folder for itself: FailedPrecondition another process has it.
  static absl::StatusOr<std::unique_ptr<PrefillRunner>> Create(const PrefillRunnerConfig& config,
                                                               const kvstore::Bucket& bucket,
                                                               std::vector<RunnableModel> models,
                                                               ThreadPool* pool);

  bool Fits(const JobRecord& record) const override;
  absl::StatusOr<std::unique_ptr<PreparedJob>> Prepare(const JobRecord& record,
                                                       std::string document) override;
  void Forget(const JobRecord& record) override;
  // What the folder has of jobs that have ended goes.
  absl::Status Tidy(JobBoard& board);

 private:
  class Prepared;
  PrefillRunner(const PrefillRunnerConfig& config, const kvstore::Bucket& bucket,
                std::vector<RunnableModel> models, ThreadPool* pool,
                std::unique_ptr<kvstore::Store> store)
      : config_(config),
        bucket_(bucket),
        models_(std::move(models)),
        pool_(pool),
        store_(std::move(store)) {}
  const RunnableModel* Find(const JobRecord& record) const;
  void Drop(const std::string& name);

  const PrefillRunnerConfig config_;
  const kvstore::Bucket& bucket_;
  const std::vector<RunnableModel> models_;
  ThreadPool* const pool_;
  const std::unique_ptr<kvstore::Store> store_;
};

}  // namespace carrel::serving
