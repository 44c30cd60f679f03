// What:   a new context with the rows of another one of the same store and an index of its own: to
//         try kinds and parameters without running the model again.
// Errors: NotFound the source; AlreadyExists the new name; FailedPrecondition the store is locked;
//         DataLoss the source's rows; ResourceExhausted disk full. A failure leaves nothing behind.
// Edge:   summaries of another kind are measured anew, on the document's own queries alone: those of a
//         probe are not kept (decision 092).
// Cost:   reads and writes every row once; one layer's rows in memory. Not resumable.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/progress.h"
#include "common/thread_pool.h"
#include "kvstore/index/auto_index.h"
#include "prefill/prefill.h"

namespace carrel::prefill {

struct ReindexConfig {
  std::string store_folder;
  std::string from;
  std::string name;
  kvstore::IndexParams index;
  std::optional<kvstore::AutoIndexConfig> auto_index;  // instead of index
  int64_t summary_rows = 40;                           // as PrefillConfig
};

absl::StatusOr<PrefillReport> Reindex(const ReindexConfig& config, kvstore::Store& store,
                                      ThreadPool* pool, Progress& progress);

}  // namespace carrel::prefill
