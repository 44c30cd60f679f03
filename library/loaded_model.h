// What:      a checkpoint and the threads that run it, shared by the decoders and prefills of one process.
// Errors:    as model/checkpoint.h; InvalidArgument threads outside [0, 1024].
// Ownership: what uses it keeps it.
// Threads:   any.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "model/checkpoint.h"

namespace carrel::library {

// threads as given, or one per core for 0; InvalidArgument outside [0, 1024].
absl::StatusOr<int> ResolveThreads(int threads);

class LoadedModel {
 public:
  // threads: as ResolveThreads takes them.
  static absl::StatusOr<std::shared_ptr<LoadedModel>> Load(const std::string& path,
                                                           const std::string& adapter, int threads);
  // One that is there already, for benchmarks and tests; threads > 0.
  static std::shared_ptr<LoadedModel> Of(model::Checkpoint checkpoint, int threads);
  const std::string& path() const { return path_; }  // empty: of a checkpoint that was there
  const model::Checkpoint& checkpoint() const { return checkpoint_; }
  ThreadPool* pool() { return &pool_; }
  // Bytes that the tokenizer has no token for are left out of every text from now on (--missing-bytes drop).
  // Before anybody else uses the model.
  void DropMissingBytes();

 private:
  explicit LoadedModel(int threads) : pool_(threads - 1) {}
  std::string path_;
  ThreadPool pool_;
  model::Checkpoint checkpoint_;
};

}  // namespace carrel::library
