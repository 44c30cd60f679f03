// What:   the rows of a head divided into cells of near keys: k-means by Faiss on a sample of the
//         rows, then every row to its nearest centroid.
// Math:   nearest by |A (k - mean - c)|, A^T A = d E[q q^T] / E[q^T q] over sampled queries, as far
//         as they tell scores apart; A = 1 without queries. The mean of the keys is taken away,
//         because it is large beside what tells keys apart and centroids are kept in bf16.
// Errors: DataLoss from the rows; Internal from Faiss (names rows and lists).
// Threads: one, also inside Faiss. Deterministic.
// Cost:   2 head_dim lists (rows + kTrainingIterations * sampled rows) operations, by GEMM.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvstore/index/rows/rows.h"

namespace faiss {
struct Index;
}

namespace carrel::kvstore {

class Accelerator;
struct SampledQueries;

// How far keys are from each other, as queries see it.
class QueryMetric {
 public:
  // Without queries (null or none): as all directions see it. They have keys' head_dim.
  QueryMetric(const SampledQueries* queries, int64_t head_dim);
  // A times the rows without the mean: out [rows.size(), head_dim].
  void Gather(const Rows& keys, absl::Span<const uint32_t> rows, const std::vector<float>& mean,
              std::vector<float>& out) const;
  // x [n, head_dim] becomes A x.
  void Apply(std::vector<float>& x) const;

 private:
  int64_t head_dim_;
  std::vector<float> a_;  // [head_dim, head_dim], or none
};

struct Partition {
  int64_t lists = 0;
  std::vector<float> mean;          // [head_dim], of the sample
  std::vector<uint16_t> centroids;  // bf16 [lists, head_dim], of the rows without the mean
  std::vector<float> spreads;     // [lists]: mean of |A (k - mean - c)|^2 / head_dim over the list
  std::vector<uint32_t> offsets;  // [lists + 1]
  std::vector<uint32_t> rows;     // [rows], by list, ascending in each

  absl::Span<const uint32_t> List(int64_t list) const {
    const auto i = static_cast<size_t>(list);
    return absl::MakeConstSpan(rows).subspan(offsets[i], offsets[i + 1] - offsets[i]);
  }
};

// lists <= keys.count(), and > 0 if there are keys.
// accelerator, if not null, trains the centroids.
absl::StatusOr<Partition> MakePartition(const Rows& keys, const QueryMetric& metric, int64_t lists,
                                        Accelerator* accelerator = nullptr);

// Centroids [lists, d] of k-means over x [n, d], assigned with `nearest`, which is left holding
// them. Faiss's exceptions pass through.
std::vector<float> TrainCentroids(const std::vector<float>& x, int64_t lists,
                                  faiss::Index& nearest);

}  // namespace carrel::kvstore
