#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "kernels/select/argmax/argmax.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/building/accelerator.h"
#include "kvstore/index/building/small_matrices.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/index/summaries/summaries_header.h"

namespace carrel::kvstore {
namespace {

constexpr int kLloydSteps = 5;
// Rows that are compared with all clusters together: their products stay in the cache.
constexpr int64_t kTileRows = 512;
// Queries from which spreads are learned: evenly spread over those sampled.
constexpr int64_t kLearnedQueries = 128;
// Of all directions, which are kept equally important: queries to come are not those sampled.
constexpr double kIsotropicShare = 0.1;

Floats MeanOf(const Rows& rows) {
  const int64_t d = rows.head_dim();
  Floats row(static_cast<size_t>(d));
  std::vector<double> sum(static_cast<size_t>(d));
  for (Position i = 0; i < rows.count(); ++i) {
    WidenToFloat(DType::kBf16, rows.Address(i), d, row.data());
    for (int64_t c = 0; c < d; ++c) sum[c] += row[c];
  }
  Floats mean;
  for (double s : sum) {
    mean.push_back(static_cast<float>(s / static_cast<double>(std::max<int64_t>(1, rows.count()))));
  }
  return mean;
}

// [range, d] f32, less `centre` where there is one.
Floats Widened(const Rows& rows, RowRange range, const Floats* centre) {
  const int64_t d = rows.head_dim();
  Floats x(static_cast<size_t>(range.rows() * d));
  for (Position i = range.begin; i < range.end; ++i) {
    float* row = &x[(i - range.begin) * d];
    WidenToFloat(DType::kBf16, rows.Address(i), d, row);
    for (int64_t c = 0; centre != nullptr && c < d; ++c) row[c] -= (*centre)[c];
  }
  return x;
}

// The second moment M of the queries, scaled to a mean diagonal of 1, as L of M = L L^T: rows are
// near if all queries score them alike, (x - y)^T M (x - y) = |x L - y L|^2. Returns L^T [d, d].
Floats QueryTransform(const SampledQueries& sampled, int64_t d) {
  const auto count = static_cast<int64_t>(sampled.queries.size()) / d;
  Floats moment(static_cast<size_t>(d * d));
  kernels::AddOuterProducts(sampled.queries.data(), d, sampled.queries.data(), d, count,
                            moment.data());
  double trace = 0;
  for (int64_t i = 0; i < d; ++i) trace += moment[i * d + i];
  if (!(trace > 0)) return {};
  std::vector<double> m(moment.begin(), moment.end()), none;
  for (double& x : m) x *= (1 - kIsotropicShare) * static_cast<double>(d) / trace;
  for (int64_t i = 0; i < d; ++i) m[i * d + i] += kIsotropicShare;
  SolveCholesky(m, d, none, 0);
  Floats transposed(moment.size());
  for (int64_t j = 0; j < d; ++j) {
    for (int64_t i = j; i < d; ++i) transposed[j * d + i] = static_cast<float>(m[i * d + j]);
  }
  return transposed;
}

// Means of the rows of each cluster; a cluster without rows keeps what it has.
void UpdateMeans(const Floats& x, int64_t d, const std::vector<uint8_t>& cluster, Floats& means) {
  const auto clusters = static_cast<int64_t>(means.size()) / d;
  std::vector<double> sums(means.size());
  std::vector<int64_t> counts(static_cast<size_t>(clusters));
  for (size_t i = 0; i < cluster.size(); ++i) {
    double* sum = &sums[cluster[i] * d];
    for (int64_t c = 0; c < d; ++c) sum[c] += x[i * d + c];
    ++counts[cluster[i]];
  }
  for (int64_t k = 0; k < clusters; ++k) {
    if (counts[k] == 0) continue;
    for (int64_t c = 0; c < d; ++c) {
      means[k * d + c] = static_cast<float>(sums[k * d + c] / static_cast<double>(counts[k]));
    }
  }
}

// The nearest mean of each row, the first of several.
void Assign(const Floats& x, int64_t d, const Floats& means, std::vector<uint8_t>& cluster) {
  const auto n = static_cast<int64_t>(cluster.size());
  const auto clusters = static_cast<int64_t>(means.size()) / d;
  Floats bias, products(static_cast<size_t>(kTileRows * clusters));
  std::vector<int32_t> nearest;
  Multiply multiply;
  for (int64_t k = 0; k < clusters; ++k) {
    double norm = 0;
    for (int64_t c = 0; c < d; ++c) norm += double{means[k * d + c]} * means[k * d + c];
    bias.push_back(static_cast<float>(-norm / 2));
  }
  for (int64_t at = 0; at < n; at += kTileRows) {
    const int64_t rows = std::min(kTileRows, n - at);
    multiply(&x[at * d], rows, {means.data(), DType::kF32, clusters, d, bias.data()},
             products.data());
    nearest.resize(static_cast<size_t>(rows));
    kernels::ArgmaxRows(products.data(), rows, clusters, nearest.data());
    std::transform(nearest.begin(), nearest.end(), cluster.begin() + at,
                   [](int32_t k) { return static_cast<uint8_t>(k); });
  }
}

// Lloyd's iterations from means that are rows, evenly spread over the segment.
std::vector<uint8_t> Cluster(const Floats& rows, int64_t n, int64_t d, int64_t clusters,
                             const SummaryPlan& plan) {
  const Floats x = plan.transform.empty() ? rows : Multiply()(rows, n, plan.transform, d);
  Floats means;
  for (int64_t k = 0; k < clusters; ++k) {
    const float* row = &x[(2 * k + 1) * n / (2 * clusters) * d];
    means.insert(means.end(), row, row + d);
  }
  std::vector<uint8_t> cluster(static_cast<size_t>(n));
  for (int step = 0; step < plan.lloyd_steps; ++step) {
    Assign(x, d, means, cluster);
    if (step + 1 < plan.lloyd_steps) UpdateMeans(x, d, cluster, means);
  }
  return cluster;
}

// [clusters, d] in int8 with a scale each; the means become what int8 says.
struct Quantised {
  std::vector<int8_t> bytes;
  Floats scales;
};
Quantised Quantise(Floats& means, int64_t d) {
  Quantised q;
  for (size_t at = 0; at < means.size(); at += d) {
    float largest = 0;
    for (int64_t c = 0; c < d; ++c) largest = std::max(largest, std::abs(means[at + c]));
    const float scale = largest / 127;
    q.scales.push_back(scale);
    for (int64_t c = 0; c < d; ++c) {
      const float x = scale == 0 ? 0.0f : std::nearbyint(means[at + c] / scale);
      q.bytes.push_back(static_cast<int8_t>(std::clamp(x, -127.0f, 127.0f)));
      means[at + c] = scale * x;
    }
  }
  return q;
}

// Indices into [samples * group], at most kLearnedQueries.
std::vector<int64_t> LearnedIndices(const SampledQueries& sampled) {
  const int64_t count = sampled.samples() * sampled.group;
  const int64_t wanted = std::min(kLearnedQueries, count);
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < wanted; ++i) indices.push_back((2 * i + 1) * count / (2 * wanted));
  return indices;
}

// [at most kLearnedQueries, d], times the scale of attention.
Floats LearnedQueries(const SampledQueries* sampled, int64_t d) {
  Floats queries;
  if (sampled == nullptr) return queries;
  const float scale = 1 / std::sqrt(static_cast<float>(d));
  for (const int64_t index : LearnedIndices(*sampled)) {
    const float* q = &sampled->queries[static_cast<size_t>(index * d)];
    for (int64_t c = 0; c < d; ++c) queries.push_back(scale * q[c]);
  }
  return queries;
}

// Of each cluster the w with the least squared error of w |q|^2 / 2 = ln mean exp(<q, k - mean>)
// over the queries, which include the scale.
Floats LearnSpreads(const Floats& x, int64_t d, const std::vector<uint8_t>& cluster,
                    const Floats& means, const Floats& queries) {
  const auto n = static_cast<int64_t>(cluster.size());
  const auto clusters = static_cast<int64_t>(means.size()) / d;
  const auto count = static_cast<int64_t>(queries.size()) / d;
  Multiply multiply;
  const Floats scores = multiply(x, n, queries, count);
  const Floats mean_scores = multiply(means, clusters, queries, count);
  std::vector<double> sums(mean_scores.size());
  std::vector<int64_t> sizes(static_cast<size_t>(clusters));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t k = cluster[i];
    ++sizes[k];
    for (int64_t j = 0; j < count; ++j) {
      // Bounded: one far row must not make the sum infinite.
      const float above = scores[i * count + j] - mean_scores[k * count + j];
      sums[k * count + j] += std::exp(std::min(above, 80.0f));
    }
  }
  Floats spreads;
  for (int64_t k = 0; k < clusters; ++k) {
    double product = 0, square = 0;
    for (int64_t j = 0; j < count && sizes[k] > 0; ++j) {
      double half = 0;
      for (int64_t c = 0; c < d; ++c) half += double{queries[j * d + c]} * queries[j * d + c] / 2;
      product += half * std::log(sums[k * count + j] / static_cast<double>(sizes[k]));
      square += half * half;
    }
    spreads.push_back(square > 0 ? static_cast<float>(std::max(0.0, product / square)) : 0.0f);
  }
  return spreads;
}

// Of each cluster the mean square of a coordinate about the mean.
Floats IsotropicSpreads(const Floats& x, int64_t d, const std::vector<uint8_t>& cluster,
                        const Floats& means) {
  const auto clusters = static_cast<int64_t>(means.size()) / d;
  std::vector<double> squares(static_cast<size_t>(clusters));
  std::vector<int64_t> sizes(static_cast<size_t>(clusters));
  for (size_t i = 0; i < cluster.size(); ++i) {
    for (int64_t c = 0; c < d; ++c) {
      const double away = double{x[i * d + c]} - means[cluster[i] * d + c];
      squares[cluster[i]] += away * away;
    }
    ++sizes[cluster[i]];
  }
  Floats spreads;
  for (int64_t k = 0; k < clusters; ++k) {
    const auto coordinates = static_cast<double>(std::max<int64_t>(1, sizes[k]) * d);
    spreads.push_back(static_cast<float>(squares[k] / coordinates));
  }
  return spreads;
}

template <typename T>
void Put(const std::vector<T>& values, char*& at) {
  const size_t bytes = values.size() * sizeof(T);
  std::memcpy(at, values.data(), bytes);
  at += bytes;
}

void SummariseSegment(const SummaryPlan& plan, const SummaryLayout& layout, const Rows& keys,
                      const Rows& values, const Floats& centre, int64_t segment, char* blob) {
  const int64_t d = keys.head_dim();
  const RowRange range = layout.RowsOf(segment);
  const int64_t n = range.rows(), clusters = layout.ClustersOf(segment);
  const Floats x = Widened(keys, range, &centre), v = Widened(values, range, nullptr);
  const std::vector<uint8_t> cluster = Cluster(x, n, d, clusters, plan);
  std::vector<uint32_t> sizes(static_cast<size_t>(clusters));
  for (uint8_t k : cluster) ++sizes[k];
  Floats key_means(static_cast<size_t>(clusters * d)), value_means(key_means.size());
  UpdateMeans(x, d, cluster, key_means);
  UpdateMeans(v, d, cluster, value_means);
  const Quantised key_bytes = Quantise(key_means, d), value_bytes = Quantise(value_means, d);
  char* at = blob + layout.Offset(segment);
  Put(sizes, at);
  Put(key_bytes.scales, at);
  Put(value_bytes.scales, at);
  Put(plan.queries.empty() ? IsotropicSpreads(x, d, cluster, key_means)
                           : LearnSpreads(x, d, cluster, key_means, plan.queries),
      at);
  Put(key_bytes.bytes, at);
  Put(value_bytes.bytes, at);
  Put(cluster, at);
}

// What an accelerator would do.
Floats Summarise(const SummaryPlan& plan, const SummaryLayout& layout, const Rows& keys,
                 const Rows& values, ThreadPool* pool, char* blob) {
  Floats centre = MeanOf(keys);
  const auto summarise = [&](int64_t segment) {
    SummariseSegment(plan, layout, keys, values, centre, segment, blob);
  };
  if (pool != nullptr) {
    pool->ParallelFor(layout.segments(), summarise);
  } else {
    for (int64_t segment = 0; segment < layout.segments(); ++segment) summarise(segment);
  }
  return centre;
}

}  // namespace

std::vector<int64_t> LearnedSamples(const SampledQueries& sampled) {
  std::vector<int64_t> samples;
  for (const int64_t index : LearnedIndices(sampled)) {
    const int64_t sample = index / sampled.group;
    if (samples.empty() || samples.back() != sample) samples.push_back(sample);
  }
  return samples;
}

absl::StatusOr<std::string> BuildSummaries(int64_t cluster_rows, const Rows& keys,
                                           const Rows& values, const SampledQueries* sampled,
                                           Accelerator* accelerator, ThreadPool* pool) {
  RETURN_IF_ERROR(ValidateSummaryRows(cluster_rows));
  const int64_t d = keys.head_dim(), rows = keys.count();
  if (cluster_rows == 0 || values.head_dim() != d || values.count() != rows ||
      (sampled != nullptr && sampled->head_dim != d)) {
    return absl::InvalidArgumentError(
        absl::StrCat("summaries of ", cluster_rows, " rows per cluster, of ", rows, " keys of ", d,
                     " and ", values.count(), " V rows of ", values.head_dim()));
  }
  RETURN_IF_ERROR(keys.Verify({0, rows}));
  RETURN_IF_ERROR(values.Verify({0, rows}));
  SummaryPlan plan;
  if (sampled != nullptr) plan.transform = QueryTransform(*sampled, d);
  plan.queries = LearnedQueries(sampled, d);
  plan.lloyd_steps = kLloydSteps;
  const SummaryLayout layout(rows, d, cluster_rows);
  std::string blob(static_cast<size_t>(layout.blob_bytes()), '\0');
  absl::StatusOr<Floats> centre = absl::UnimplementedError("no accelerator");
  if (accelerator != nullptr) {
    centre = accelerator->Summarise(plan, layout, keys, values, blob.data());
  }
  if (absl::IsUnimplemented(centre.status())) {
    centre = Summarise(plan, layout, keys, values, pool, blob.data());
  }
  RETURN_IF_ERROR(centre.status());
  const std::string header = EncodeSummaryHeader({rows, d, cluster_rows, EstimateFit()}, *centre);
  header.copy(blob.data(), header.size());
  return blob;
}

}  // namespace carrel::kvstore
