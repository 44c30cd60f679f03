// What:   the first token after opening: rows and index in files, nothing of them in memory.
// Math:   the blobs of a kind are published as a context of their own, and laid over the measured
//         one: StoredContext is an interface. Then every mapping is closed, the page cache of both
//         stores' files dropped (posix_fadvise), everything opened anew, and one query asked of
//         each head. Opening, reading and verifying are all part of the time.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/retrieval/case.h"
#include "kvstore/index/index.h"

namespace carrel::bench {

struct ColdResult {
  double ms = 0;        // median, scaled to all heads
  double resident = 0;  // largest share of the files that stayed in memory
};

// What is kept of a case when its rows are closed.
struct ColdCase {
  std::string store_folder, name;
  AttentionShape shape;
  RowRange zone;
  float scale = 0;
  double times = 1;  // Case::times
  std::vector<std::pair<Layer, KvHead>> heads;
  std::vector<std::vector<float>> queries;  // one per head
};
ColdCase MakeCold(const Case& c, const std::string& store_folder);

// Publishes a blob per head in scratch/store under a name of the kind. Empty blobs need no store.
absl::Status StoreBlobs(const ColdCase& c, const std::string& scratch, const std::string& name,
                        const std::vector<std::string>& blobs);

absl::StatusOr<ColdResult> MeasureCold(const ColdCase& c, const std::string& scratch,
                                       const std::string& name, const kvstore::IndexParams& params,
                                       int64_t top_k, ThreadPool& pool);

}  // namespace carrel::bench
