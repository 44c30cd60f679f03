// What:   what Faiss does of index building on a GPU: exact nearest keys, k-means.
// Math:   as accelerator.h; fp32.
// Errors: Create: Unimplemented this build's Faiss has no GPU half; Unavailable no device. Else
//         Internal: Faiss's exceptions, caught here.
// Threads: any; one call at a time, others wait.
// Cost:   device memory for the keys in fp32, and for Faiss's scratch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/index/building/accelerator.h"
#include "kvstore/index/rows/rows.h"

namespace carrel::kvstore {

class FaissGpu {
 public:
  static absl::StatusOr<std::unique_ptr<FaissGpu>> Create();
  virtual ~FaissGpu() = default;
  virtual absl::StatusOr<NearestKeys> FindNearest(const std::vector<float>& queries,
                                                  const std::vector<Position>& limits,
                                                  const Rows& keys, int64_t k) = 0;
  virtual absl::StatusOr<std::vector<float>> TrainLists(const std::vector<float>& x,
                                                        int64_t head_dim, int64_t lists) = 0;
};

}  // namespace carrel::kvstore
