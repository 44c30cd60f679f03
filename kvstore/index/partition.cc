#include "kvstore/index/partition.h"

#include <faiss/Clustering.h>
#include <faiss/Index.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/linear/linear.h"

namespace carrel::kvstore {
namespace {

using Floats = std::vector<float>;

// More rows per list or more iterations find no more keys (registry-8k).
constexpr int64_t kSampledRowsPerList = 32;
constexpr int kTrainingIterations = 8;
constexpr int64_t kAssignedRows = 256;  // at a time

// Finds the nearest centroid; as a Faiss index, what k-means assigns with.
class NearestCentroid final : public faiss::Index {
 public:
  explicit NearestCentroid(int64_t head_dim) : faiss::Index(static_cast<int>(head_dim)) {}

  void add(idx_t n, const float* x) override {
    centroids_.assign(x, x + n * d);
    minus_half_squares_.clear();
    for (idx_t i = 0; i < n; ++i) {
      const float* c = x + i * d;
      minus_half_squares_.push_back(-0.5f * std::inner_product(c, c + d, c, 0.0f));
    }
    ntotal = n;
  }
  void reset() override { ntotal = 0; }
  void search(idx_t n, const float* x, idx_t, float* distances, idx_t* lists,
              const faiss::SearchParameters*) const override {
    const kernels::WeightMatrix w{centroids_.data(), DType::kF32, ntotal, d,
                                  minus_half_squares_.data()};
    Floats scratch(static_cast<size_t>(kernels::LinearScratchFloats(w)));
    Floats products(static_cast<size_t>(kAssignedRows * ntotal));
    for (idx_t at = 0; at < n; at += kAssignedRows) {
      const idx_t count = std::min<idx_t>(kAssignedRows, n - at);
      kernels::Linear(x + at * d, count, d, w, products.data(), ntotal, scratch.data());
      for (idx_t i = at; i < at + count; ++i) {
        const float* of_row = products.data() + (i - at) * ntotal;
        lists[i] = std::max_element(of_row, of_row + ntotal) - of_row;
        const float* row = x + i * d;
        const float square = std::inner_product(row, row + d, row, 0.0f);
        distances[i] = std::max(0.0f, square - 2 * of_row[lists[i]]);
      }
    }
  }

 private:
  Floats centroids_, minus_half_squares_;
};

Floats SampleMean(const Rows& keys, absl::Span<const uint32_t> sample) {
  const int64_t d = keys.head_dim();
  Floats row(static_cast<size_t>(d)), mean;
  std::vector<double> sum(row.size());
  for (const uint32_t at : sample) {
    WidenToFloat(DType::kBf16, keys.Address(at), d, row.data());
    for (size_t c = 0; c < row.size(); ++c) sum[c] += row[c];
  }
  for (const double s : sum) mean.push_back(static_cast<float>(s / double(sample.size())));
  return mean;
}

// Leaves the centroids in `nearest`, rounded to bf16.
void Train(const Rows& keys, absl::Span<const uint32_t> sample, Partition& p,
           NearestCentroid& nearest) {
  const int64_t d = keys.head_dim(), n = static_cast<int64_t>(sample.size());
  Floats x(static_cast<size_t>(n * d));
  GatherCentred(keys, sample, p.mean, x.data());
  faiss::ClusteringParameters params;
  params.niter = kTrainingIterations;
  params.min_points_per_centroid = 1;
  params.max_points_per_centroid = static_cast<int>(n);
  params.seed = 20250727;
  faiss::Clustering clustering(static_cast<int>(d), static_cast<int>(p.lists), params);
  clustering.train(n, x.data(), nearest);
  p.centroids.resize(static_cast<size_t>(p.lists * d));
  FloatToBf16(clustering.centroids, p.centroids.data());
  Bf16ToFloat(p.centroids, clustering.centroids.data());
  nearest.add(p.lists, clustering.centroids.data());
}

void Assign(const Rows& keys, const NearestCentroid& nearest, Partition& p) {
  const int64_t d = keys.head_dim(), rows = keys.count();
  std::vector<faiss::Index::idx_t> lists(static_cast<size_t>(rows));
  Floats x(static_cast<size_t>(kAssignedRows * d)), distances(static_cast<size_t>(kAssignedRows));
  std::vector<uint32_t> block(static_cast<size_t>(kAssignedRows));
  std::vector<double> squares(static_cast<size_t>(p.lists));
  p.offsets.assign(static_cast<size_t>(p.lists) + 1, 0);
  for (Position at = 0; at < rows; at += kAssignedRows) {
    block.resize(static_cast<size_t>(std::min(kAssignedRows, rows - at)));
    std::iota(block.begin(), block.end(), static_cast<uint32_t>(at));
    GatherCentred(keys, block, p.mean, x.data());
    nearest.search(static_cast<int64_t>(block.size()), x.data(), 1, distances.data(),
                   &lists[static_cast<size_t>(at)], nullptr);
    for (size_t i = 0; i < block.size(); ++i) {
      const auto list = static_cast<size_t>(lists[block[i]]);
      if (std::isfinite(distances[i])) squares[list] += distances[i];
      ++p.offsets[list + 1];
    }
  }
  for (size_t list = 0; list < squares.size(); ++list) {
    const double count = std::max<uint32_t>(p.offsets[list + 1], 1);
    p.spreads.push_back(static_cast<float>(squares[list] / count / double(d)));
    p.offsets[list + 1] += p.offsets[list];
  }
  p.rows.resize(static_cast<size_t>(rows));
  std::vector<uint32_t> next(p.offsets.begin(), p.offsets.end() - 1);
  for (Position row = 0; row < rows; ++row) {
    p.rows[next[static_cast<size_t>(lists[static_cast<size_t>(row)])]++] =
        static_cast<uint32_t>(row);
  }
}

}  // namespace

void GatherCentred(const Rows& keys, absl::Span<const uint32_t> rows, const Floats& mean,
                   float* out) {
  for (const uint32_t row : rows) {
    WidenToFloat(DType::kBf16, keys.Address(row), keys.head_dim(), out);
    for (const float m : mean) *out++ -= m;
  }
}

absl::StatusOr<Partition> MakePartition(const Rows& keys, int64_t lists) {
  RETURN_IF_ERROR(keys.Verify({0, keys.count()}));
  Partition p{.lists = lists};
  p.mean.resize(static_cast<size_t>(keys.head_dim()));
  p.offsets.assign(1, 0);
  if (keys.count() == 0) return p;
  const int64_t sampled = std::min(keys.count(), kSampledRowsPerList * lists);
  std::vector<uint32_t> sample(static_cast<size_t>(sampled));
  for (int64_t i = 0; i < sampled; ++i) {
    sample[static_cast<size_t>(i)] = static_cast<uint32_t>(i * keys.count() / sampled);
  }
  p.mean = SampleMean(keys, sample);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);  // of this thread's parallel regions only
  const absl::Cleanup restore = [threads] { omp_set_num_threads(threads); };
  try {
    NearestCentroid nearest(keys.head_dim());
    Train(keys, sample, p, nearest);
    Assign(keys, nearest, p);
  } catch (const std::exception& error) {  // Faiss's own, and no memory
    return absl::InternalError(
        absl::StrCat("k-means of ", keys.count(), " rows into ", lists, " lists: ", error.what()));
  }
  return p;
}

}  // namespace carrel::kvstore
