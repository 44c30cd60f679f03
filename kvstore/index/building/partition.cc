#include "kvstore/index/building/partition.h"

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
#include "kernels/layer/linear/linear.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/building/accelerator.h"

namespace carrel::kvstore {
namespace {

using Floats = std::vector<float>;

// More rows per list or more iterations find no more keys (registry-8k).
constexpr int64_t kSampledRowsPerList = 32;
constexpr int kTrainingIterations = 8;
constexpr int64_t kAssignedRows = 256;  // at a time
constexpr int64_t kMetricQueries = 2048;
// Share of the metric that sees all directions alike: queries to come differ from those sampled.
constexpr double kMetricRidge = 0.05;

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

// Leaves the centroids in `nearest`, in the metric's own coordinates.
absl::Status Train(const Rows& keys, const QueryMetric& metric, absl::Span<const uint32_t> sample,
                   const Partition& p, Accelerator* accelerator, NearestCentroid& nearest) {
  Floats x;
  metric.Gather(keys, sample, p.mean, x);
  if (accelerator != nullptr) {
    const absl::StatusOr<Floats> centroids = accelerator->TrainLists(x, keys.head_dim(), p.lists);
    if (centroids.ok()) {
      nearest.add(p.lists, centroids->data());
      return absl::OkStatus();
    }
    if (!absl::IsUnimplemented(centroids.status())) return centroids.status();
  }
  TrainCentroids(x, p.lists, nearest);
  return absl::OkStatus();
}

void Assign(const Rows& keys, const QueryMetric& metric, const NearestCentroid& nearest,
            Partition& p) {
  const int64_t rows = keys.count();
  std::vector<faiss::Index::idx_t> lists(static_cast<size_t>(rows));
  Floats x, distances(static_cast<size_t>(kAssignedRows));
  std::vector<uint32_t> block(static_cast<size_t>(kAssignedRows));
  p.offsets.assign(static_cast<size_t>(p.lists) + 1, 0);
  for (Position at = 0; at < rows; at += kAssignedRows) {
    block.resize(static_cast<size_t>(std::min(kAssignedRows, rows - at)));
    std::iota(block.begin(), block.end(), static_cast<uint32_t>(at));
    metric.Gather(keys, block, p.mean, x);
    nearest.search(static_cast<int64_t>(block.size()), x.data(), 1, distances.data(),
                   &lists[static_cast<size_t>(at)], nullptr);
  }
  for (const faiss::Index::idx_t list : lists) ++p.offsets[static_cast<size_t>(list) + 1];
  std::partial_sum(p.offsets.begin(), p.offsets.end(), p.offsets.begin());
  p.rows.resize(static_cast<size_t>(rows));
  std::vector<uint32_t> next(p.offsets.begin(), p.offsets.end() - 1);
  for (Position row = 0; row < rows; ++row) {
    p.rows[next[static_cast<size_t>(lists[static_cast<size_t>(row)])]++] =
        static_cast<uint32_t>(row);
  }
}

// Centroids are the means of what the lists hold, in bf16; spreads are around those.
void Describe(const Rows& keys, const QueryMetric& metric, Partition& p) {
  const int64_t d = keys.head_dim();
  Floats x, row(static_cast<size_t>(d));
  std::vector<double> sum(row.size());
  p.centroids.resize(static_cast<size_t>(p.lists * d));
  p.spreads.assign(static_cast<size_t>(p.lists), 0);
  for (int64_t list = 0; list < p.lists; ++list) {
    const absl::Span<const uint32_t> rows = p.List(list);
    if (rows.empty()) continue;
    uint16_t* centroid = &p.centroids[static_cast<size_t>(list * d)];
    std::fill(sum.begin(), sum.end(), 0);
    x.resize(rows.size() * row.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      float* at = &x[i * row.size()];
      WidenToFloat(DType::kBf16, keys.Address(rows[i]), d, at);
      for (size_t c = 0; c < row.size(); ++c) sum[c] += at[c] -= p.mean[c];
    }
    for (size_t c = 0; c < row.size(); ++c) {
      const double mean = sum[c] / static_cast<double>(rows.size());
      centroid[c] = FloatToBf16(std::isfinite(mean) ? static_cast<float>(mean) : 0);
    }
    WidenToFloat(DType::kBf16, centroid, d, row.data());
    for (size_t i = 0; i < x.size(); ++i) x[i] -= row[i % row.size()];
    metric.Apply(x);
    double squares = 0;
    for (const float at : x) squares += double{at} * at;
    const auto spread = static_cast<float>(squares / static_cast<double>(x.size()));
    if (std::isfinite(spread)) p.spreads[static_cast<size_t>(list)] = spread;
  }
}

// Upper triangular A with A^T A = M, for a symmetric positive definite M [n, n].
Floats Root(const std::vector<double>& m, int64_t n) {
  std::vector<double> a(m.size());
  const auto at = [n](int64_t i, int64_t j) { return static_cast<size_t>(i * n + j); };
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) {
      double sum = m[at(i, j)];
      for (int64_t k = 0; k < i; ++k) sum -= a[at(k, i)] * a[at(k, j)];
      a[at(i, j)] = i == j ? std::sqrt(std::max(sum, 1e-30)) : sum / a[at(i, i)];
    }
  }
  return Floats(a.begin(), a.end());
}

}  // namespace

std::vector<float> TrainCentroids(const std::vector<float>& x, int64_t lists,
                                  faiss::Index& nearest) {
  const auto n = static_cast<int64_t>(x.size()) / nearest.d;
  faiss::ClusteringParameters params;
  params.niter = kTrainingIterations;
  params.min_points_per_centroid = 1;
  params.max_points_per_centroid = static_cast<int>(n);
  params.seed = 20250727;
  faiss::Clustering clustering(static_cast<int>(nearest.d), static_cast<int>(lists), params);
  clustering.train(n, x.data(), nearest);
  nearest.reset();
  nearest.add(lists, clustering.centroids.data());
  return std::move(clustering.centroids);
}

QueryMetric::QueryMetric(const SampledQueries* queries, int64_t head_dim) : head_dim_(head_dim) {
  if (queries == nullptr || queries->samples() == 0) return;
  const int64_t d = head_dim, n = queries->samples() * queries->group;
  const int64_t used = std::min(n, kMetricQueries);
  std::vector<double> m(static_cast<size_t>(d * d));
  for (int64_t i = 0; i < used; ++i) {
    const float* q = &queries->queries[static_cast<size_t>(i * n / used * d)];
    for (int64_t r = 0; r < d; ++r) {
      for (int64_t c = 0; c < d; ++c) m[static_cast<size_t>(r * d + c)] += double{q[r]} * q[c];
    }
  }
  double trace = 0;
  for (int64_t i = 0; i < d; ++i) trace += m[static_cast<size_t>(i * d + i)];
  if (!(trace > 0) || !std::isfinite(trace)) return;
  for (double& x : m) x *= (1 - kMetricRidge) * static_cast<double>(d) / trace;
  for (int64_t i = 0; i < d; ++i) m[static_cast<size_t>(i * d + i)] += kMetricRidge;
  a_ = Root(m, d);
}

void QueryMetric::Apply(Floats& x) const {
  if (a_.empty()) return;
  const kernels::WeightMatrix w{a_.data(), DType::kF32, head_dim_, head_dim_};
  Floats scratch(static_cast<size_t>(kernels::LinearScratchFloats(w))), y(x.size());
  kernels::Linear(x.data(), static_cast<int64_t>(x.size()) / head_dim_, head_dim_, w, y.data(),
                  head_dim_, scratch.data());
  x.swap(y);
}

void QueryMetric::Gather(const Rows& keys, absl::Span<const uint32_t> rows, const Floats& mean,
                         Floats& out) const {
  out.resize(rows.size() * mean.size());
  float* at = out.data();
  for (const uint32_t row : rows) {
    WidenToFloat(DType::kBf16, keys.Address(row), head_dim_, at);
    for (const float m : mean) *at++ -= m;
  }
  Apply(out);
}

absl::StatusOr<Partition> MakePartition(const Rows& keys, const QueryMetric& metric, int64_t lists,
                                        Accelerator* accelerator) {
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
    RETURN_IF_ERROR(Train(keys, metric, sample, p, accelerator, nearest));
    Assign(keys, metric, nearest, p);
    Describe(keys, metric, p);
  } catch (const std::exception& error) {  // Faiss's own, and no memory
    return absl::InternalError(
        absl::StrCat("k-means of ", keys.count(), " rows into ", lists, " lists: ", error.what()));
  }
  return p;
}

}  // namespace carrel::kvstore
