#include <faiss/impl/AuxIndexStructures.h>
#include <faiss/impl/DistanceComputer.h>
#include <faiss/impl/HNSW.h>
#include <omp.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "common/status.h"
#include "kernels/score/dot_score/dot_score.h"
#include "lab/kinds/hnsw/hnsw.h"
#include "lab/kinds/links/hnsw_links.h"

namespace carrel::kvstore {

namespace {

// What nearness of two rows means when the graph is built: the inner product of the centred rows.
// A query ranks centred rows as it ranks the rows themselves (the difference is one constant per
// query), but without the large common mean of keys the products tell neighbours apart.
// Math: distance(i, j) = <x_i, mean> + <x_j, mean> - <x_i, x_j>
//                      = |mean|^2 - <x_i - mean, x_j - mean>
class CentredProduct final : public faiss::DistanceComputer {
 public:
  explicit CentredProduct(const Rows& keys) : keys_(keys) {
    const auto dim = static_cast<size_t>(keys.head_dim());
    std::vector<double> sum(dim);
    std::vector<float> row(dim), mean(dim);
    for (Position i = 0; i < keys.count(); ++i) {
      WidenToFloat(DType::kBf16, keys.Address(i), keys.head_dim(), row.data());
      for (size_t c = 0; c < dim; ++c) sum[c] += row[c];
    }
    for (size_t c = 0; c < dim; ++c) {
      mean[c] =
          static_cast<float>(sum[c] / static_cast<double>(std::max<int64_t>(keys.count(), 1)));
    }
    on_mean_.reserve(static_cast<size_t>(keys.count()));
    for (Position i = 0; i < keys.count(); ++i) {
      on_mean_.push_back(kernels::DotF32Bf16(mean.data(), keys.Address(i), keys.head_dim()));
    }
  }

  void SetRow(idx_t row) { row_ = row; }
  void set_query(const float*) override {}  // Faiss's own way to name a query; ours is a row
  float operator()(idx_t i) override { return symmetric_dis(row_, i); }
  float symmetric_dis(idx_t i, idx_t j) override {
    return on_mean_[static_cast<size_t>(i)] + on_mean_[static_cast<size_t>(j)] -
           kernels::DotBf16(keys_.Address(i), keys_.Address(j), keys_.head_dim());
  }

 private:
  const Rows& keys_;
  std::vector<float> on_mean_;  // [rows]: <x_i, mean>
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
  CentredProduct distance(keys);
  faiss::VisitedTable visited(keys.count());
  std::vector<omp_lock_t> locks(rows);
  for (omp_lock_t& lock : locks) omp_init_lock(&lock);
  const absl::Cleanup destroy = [&locks] {
    for (omp_lock_t& lock : locks) omp_destroy_lock(&lock);
  };
  for (const int32_t row : InsertionOrder(graph.levels)) {
    distance.SetRow(row);
    graph.add_with_locks(distance, graph.levels[static_cast<size_t>(row)] - 1, row, locks, visited);
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
