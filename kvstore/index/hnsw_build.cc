#include <faiss/impl/AuxIndexStructures.h>
#include <faiss/impl/DistanceComputer.h>
#include <faiss/impl/HNSW.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "common/status.h"
#include "kernels/dot_score/dot_score.h"
#include "kvstore/index/hnsw.h"
#include "kvstore/index/hnsw_links.h"

namespace carrel::kvstore {

int g_navigation = 0;  // EXPERIMENT

namespace {

// Distances between rows for construction: smaller is nearer.
//   offset[i] + offset[j] - <x_i, x_j> - extra[i] * extra[j]
class RowDistance final : public faiss::DistanceComputer {
 public:
  explicit RowDistance(const Rows& keys) : keys_(keys) {
    const size_t n = static_cast<size_t>(keys.count());
    const size_t d = static_cast<size_t>(keys.head_dim());
    offset_.assign(n, 0);
    extra_.assign(n, 0);
    std::vector<double> mean(d);
    std::vector<float> row(d), meanf(d);
    if (g_navigation == 1 || g_navigation == 3) {
      for (size_t i = 0; i < n; ++i) {
        WidenToFloat(DType::kBf16, keys.Address(i), d, row.data());
        for (size_t c = 0; c < d; ++c) mean[c] += row[c] / n;
      }
      for (size_t c = 0; c < d; ++c) meanf[c] = mean[c];
    }
    double mm = 0;
    for (float x : meanf) mm += x * x;
    std::vector<double> norm(n);
    double biggest = 0;
    for (size_t i = 0; i < n; ++i) {
      const double dot_mean = kernels::DotF32Bf16(meanf.data(), keys.Address(i), d);
      norm[i] = kernels::DotBf16(keys.Address(i), keys.Address(i), d) - 2 * dot_mean + mm;
      biggest = std::max(biggest, norm[i]);
      if (g_navigation == 1 || g_navigation == 3) offset_[i] = dot_mean;
      if (g_navigation == 4) offset_[i] = norm[i] / 2;
    }
    if (g_navigation == 2 || g_navigation == 3) {
      for (size_t i = 0; i < n; ++i) extra_[i] = std::sqrt(std::max(0.0, biggest - norm[i]));
    }
  }
  void set_row(idx_t row) { row_ = row; }
  void set_query(const float*) override {}
  float operator()(idx_t i) override { return symmetric_dis(row_, i); }
  float symmetric_dis(idx_t i, idx_t j) override {
    return offset_[i] + offset_[j] -
           kernels::DotBf16(keys_.Address(i), keys_.Address(j), keys_.head_dim()) -
           extra_[i] * extra_[j];
  }

 private:
  const Rows& keys_;
  std::vector<float> offset_, extra_;
  idx_t row_ = 0;
};

// Rows from the highest level down, shuffled within a level.
std::vector<int32_t> InsertionOrder(const std::vector<int>& levels) {
  std::vector<int32_t> order(levels.size());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 rng(20160323);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng() % i]);
  std::stable_sort(order.begin(), order.end(), [&levels](int32_t a, int32_t b) {
    return levels[static_cast<size_t>(a)] > levels[static_cast<size_t>(b)];
  });
  return order;
}

void AddRows(faiss::HNSW& graph, const Rows& keys) {
  const size_t rows = static_cast<size_t>(keys.count());
  graph.prepare_level_tab(rows);
  RowDistance distance(keys);
  faiss::VisitedTable visited(keys.count());
  std::vector<omp_lock_t> locks(rows);
  for (omp_lock_t& lock : locks) omp_init_lock(&lock);
  const absl::Cleanup destroy = [&locks] {
    for (omp_lock_t& lock : locks) omp_destroy_lock(&lock);
  };
  for (const int32_t row : InsertionOrder(graph.levels)) {
    distance.set_row(row);
    graph.add_with_locks(distance, graph.levels[static_cast<size_t>(row)] - 1, row, locks, visited);
    // The walk that found the links marked rows.
    visited.advance();
  }
}

}  // namespace

absl::StatusOr<std::string> BuildHnsw(const IndexParams& params, const Rows& keys) {
  if (keys.count() > kMaxHnswRows) {
    return absl::InvalidArgumentError(
        absl::StrCat("hnsw: ", keys.count(), " rows, must be at most ", kMaxHnswRows));
  }
  RETURN_IF_ERROR(keys.Verify({0, keys.count()}));
  HnswLinks::Header header{.rows = keys.count(),
                           .head_dim = keys.head_dim(),
                           .m = params.m,
                           .ef_construction = params.ef_construction};
  ASSIGN_OR_RETURN(header.rows_crc, RowsCrc(keys));
  faiss::HNSW graph(params.m);
  graph.efConstruction = params.ef_construction;
  try {
    AddRows(graph, keys);
  } catch (const std::exception& error) {  // Faiss's own, and no memory
    return absl::InternalError(
        absl::StrCat("hnsw: building over ", keys.count(), " rows: ", error.what()));
  }
  header.levels = keys.count() == 0 ? 0 : graph.max_level + 1;
  header.entry = keys.count() == 0 ? 0 : static_cast<uint32_t>(graph.entry_point);
  return HnswLinks::Encode(
      header,
      [&graph](int64_t row, int32_t level) {
        size_t begin = 0, end = 0;
        graph.neighbor_range(row, level, &begin, &end);
        const auto first = graph.neighbors.begin() + static_cast<int64_t>(begin);
        const auto last = std::find(first, graph.neighbors.begin() + static_cast<int64_t>(end), -1);
        return absl::Span<const int32_t>(graph.neighbors.data() + begin,
                                         static_cast<size_t>(last - first));
      },
      [&graph](int64_t row) { return graph.levels[static_cast<size_t>(row)]; });
}

}  // namespace carrel::kvstore
