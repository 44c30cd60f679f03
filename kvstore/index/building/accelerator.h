// What:   the parts of index building that another device may do in the CPU's place. A builder asks
//         for them; where there is none, or it does not serve the shape, the CPU does the work.
// Math:   the same as the CPU's up to rounding: what is built elsewhere is as good, not the same
//         bytes.
// Errors: of the device. Unimplemented: not served, which is no failure.
// Threads: any, several at once.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/index/summaries/summaries.h"

namespace carrel::kvstore {

// How keys become bits (code.h): y = matrix x + offset, less what the bits of the stages before
// say: y_i -= sum_j feedback[i, j] b_j over all bits j of earlier stages, b_j in {-1, +1}. Bit i is
// set exactly if y_i > 0.
struct CodeMap {
  int64_t bits = 0;
  int64_t head_dim = 0;
  int64_t stage_bits = 0;       // of every stage but the last, which may have fewer
  std::vector<float> matrix;    // [bits, head_dim]
  std::vector<float> offset;    // [bits]
  std::vector<float> feedback;  // [bits, bits], or empty: one stage
};

// The keys with the largest products with each query, best first.
struct NearestKeys {
  std::vector<float> products;  // [queries, k]
  std::vector<int64_t> ids;     // [queries, k]; -1 where there are fewer
};

// How rows become summaries (summaries.h).
struct SummaryPlan {
  // Keys are compared as transform (key - mean of all keys), [head_dim, head_dim]; empty: without.
  std::vector<float> transform;
  // From which spreads are learned, times the scale of attention, [up to 128, head_dim]; empty:
  // spreads are the mean square of a coordinate about the cluster's mean.
  std::vector<float> queries;
  int lloyd_steps = 0;  // from means that are rows, evenly spread over the segment
};

class Accelerator {
 public:
  virtual ~Accelerator() = default;

  // blocks: of all keys, as kernels/score/code_score lays them out.
  virtual absl::Status EncodeKeys(const CodeMap& map, const Rows& keys, char* blocks) = 0;

  // Of query i among the first limits[i] keys. queries [limits.size(), head_dim].
  virtual absl::StatusOr<NearestKeys> FindNearest(const std::vector<float>& queries,
                                                  const std::vector<Position>& limits,
                                                  const Rows& keys, int64_t k) = 0;

  // Centroids [lists, head_dim] of k-means (partition.h) over x [n, head_dim].
  virtual absl::StatusOr<std::vector<float>> TrainLists(const std::vector<float>& x,
                                                        int64_t head_dim, int64_t lists) = 0;

  // Segments of summaries into a blob of layout.blob_bytes() zeros, whose header is left to the
  // caller. Returns the mean of all keys.
  virtual absl::StatusOr<std::vector<float>> Summarise(const SummaryPlan& plan,
                                                       const SummaryLayout& layout,
                                                       const Rows& keys, const Rows& values,
                                                       char* blob) = 0;
};

}  // namespace carrel::kvstore
