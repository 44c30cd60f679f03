#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/layer/linear/linear.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/select/topk/topk.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/building/accelerator.h"
#include "kvstore/index/building/partition.h"
#include "lab/kinds/graph/graph.h"
#include "lab/kinds/ivf/ivf.h"
#include "lab/kinds/links/hnsw_links.h"

namespace carrel::kvstore {
namespace {

using Floats = std::vector<float>;
using Scored = std::pair<float, uint32_t>;

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr int64_t kMaxQueries = 2048;   // used, evenly chosen
constexpr int64_t kKeysPerQuery = 128;  // that a query ranks
constexpr int64_t kHubsPerQuery = 8;    // its best keys: linked to all that it ranks
constexpr int64_t kScoredRows = 512;    // at a time
constexpr int64_t kCellRows = 1024;     // whose nearest keys are looked for together
constexpr int64_t kNearRows = 1024;     // among which they are looked for, at least

// Better scores first, then smaller rows.
bool Better(const Scored& a, const Scored& b) {
  return a.first > b.first || (a.first == b.first && a.second < b.second);
}

// The chosen queries of all heads of the group.
struct Queries {
  int64_t count = 0;
  Floats values;                // [count, head_dim]
  std::vector<Position> limit;  // [count]: rows below it are in its past
};

Queries Choose(const SampledQueries& sampled, int64_t rows) {
  Queries chosen;
  const int64_t samples =
      std::min(sampled.samples(), std::max<int64_t>(1, kMaxQueries / sampled.group));
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t sample = i * sampled.samples() / samples;
    const float* first = sampled.Query(sample, 0);
    chosen.values.insert(chosen.values.end(), first, first + sampled.group * sampled.head_dim);
    const Position position = sampled.positions[static_cast<size_t>(sample)];
    chosen.limit.insert(chosen.limit.end(), static_cast<size_t>(sampled.group),
                        std::min(position + 1, rows));
  }
  chosen.count = samples * sampled.group;
  return chosen;
}

// The rows that each query ranks highest, best first.
using Ranked = std::vector<std::vector<Scored>>;

Ranked RankOf(const NearestKeys& nearest, int64_t queries) {
  Ranked best(static_cast<size_t>(queries));
  for (size_t at = 0; at < nearest.ids.size(); ++at) {
    const float product = nearest.products[at];
    if (nearest.ids[at] < 0 || !(product > kLowest)) continue;  // also if NaN
    best[at / kKeysPerQuery].emplace_back(product, static_cast<uint32_t>(nearest.ids[at]));
  }
  for (std::vector<Scored>& of_query : best) std::sort(of_query.begin(), of_query.end(), Better);
  return best;
}

absl::StatusOr<Ranked> RankKeys(const Rows& keys, const Queries& queries,
                                Accelerator* accelerator) {
  if (accelerator != nullptr) {
    const absl::StatusOr<NearestKeys> nearest =
        accelerator->FindNearest(queries.values, queries.limit, keys, kKeysPerQuery);
    if (nearest.ok()) return RankOf(*nearest, queries.count);
    if (!absl::IsUnimplemented(nearest.status())) return nearest.status();
  }
  Ranked best(static_cast<size_t>(queries.count));  // heaps
  Floats products(static_cast<size_t>(queries.count * kScoredRows)), scratch;
  const int64_t d = keys.head_dim();
  const auto rank = [&](Position first, const void* address, int64_t rows) {
    const kernels::WeightMatrix w{address, DType::kBf16, rows, d};
    scratch.resize(static_cast<size_t>(kernels::LinearScratchFloats(w)));
    kernels::Linear(queries.values.data(), queries.count, d, w, products.data(), rows,
                    scratch.data());
    for (int64_t q = 0; q < queries.count; ++q) {
      std::vector<Scored>& heap = best[static_cast<size_t>(q)];
      const float* scores = products.data() + q * rows;
      const int64_t end = std::min(rows, queries.limit[static_cast<size_t>(q)] - first);
      for (int64_t i = 0; i < end; ++i) {
        const bool full = static_cast<int64_t>(heap.size()) == kKeysPerQuery;
        if (!(scores[i] > (full ? heap.front().first : kLowest))) continue;  // also if NaN
        if (full) {
          std::pop_heap(heap.begin(), heap.end(), Better);
          heap.pop_back();
        }
        heap.emplace_back(scores[i], static_cast<uint32_t>(first + i));
        std::push_heap(heap.begin(), heap.end(), Better);
      }
    }
  };
  for (Position at = 0; at < keys.count(); at += kScoredRows) {
    keys.ForEachPiece({at, std::min(keys.count(), at + kScoredRows)}, rank);
  }
  for (std::vector<Scored>& heap : best) std::sort(heap.begin(), heap.end(), Better);
  return best;
}

// Rows in lists of their own, each with what they stand at: a compressed adjacency.
struct Adjacency {
  std::vector<uint32_t> offsets;  // [rows + 1]
  std::vector<uint32_t> links;
  absl::Span<const uint32_t> Of(uint32_t row) const {
    return absl::MakeConstSpan(links).subspan(offsets[row], offsets[row + 1] - offsets[row]);
  }
};

// Keys that the same queries rank high: the best of a query with all that it ranks, and neighbours
// in its ranking. Of each row by the number of queries, then by rank.
Adjacency QueryLinks(const std::vector<std::vector<Scored>>& ranked, int64_t rows) {
  std::vector<uint64_t> pairs;
  const auto add = [&pairs](uint32_t a, uint32_t b) {
    pairs.push_back(uint64_t{a} << 32 | b);
    pairs.push_back(uint64_t{b} << 32 | a);
  };
  for (const std::vector<Scored>& of_query : ranked) {
    const auto count = static_cast<int64_t>(of_query.size());
    for (int64_t i = 0; i < count; ++i) {
      const int64_t end = i < kHubsPerQuery ? count : std::min(count, i + 3);
      for (int64_t j = i + 1; j < end; ++j) add(of_query[i].second, of_query[j].second);
    }
  }
  std::sort(pairs.begin(), pairs.end());
  Adjacency adjacency;
  adjacency.offsets.assign(static_cast<size_t>(rows) + 1, 0);
  std::vector<std::pair<int64_t, uint32_t>> of_row;  // (- queries, row)
  size_t at = 0;
  for (int64_t row = 0; row < rows; ++row) {
    of_row.clear();
    while (at < pairs.size() && static_cast<int64_t>(pairs[at] >> 32) == row) {
      const size_t first = at;
      while (at < pairs.size() && pairs[at] == pairs[first]) ++at;
      of_row.emplace_back(-static_cast<int64_t>(at - first), static_cast<uint32_t>(pairs[first]));
    }
    std::sort(of_row.begin(), of_row.end());
    for (const auto& link : of_row) adjacency.links.push_back(link.second);
    adjacency.offsets[static_cast<size_t>(row) + 1] = static_cast<uint32_t>(adjacency.links.size());
  }
  return adjacency;
}

// The lists nearest to each list, itself first, until they hold kNearRows rows.
std::vector<std::vector<uint32_t>> NearLists(const Partition& p, const QueryMetric& metric,
                                             int64_t head_dim) {
  Floats centroids(p.centroids.size()), products(static_cast<size_t>(kScoredRows * p.lists));
  Bf16ToFloat(p.centroids, centroids.data());
  metric.Apply(centroids);
  Floats minus_half_squares;
  for (int64_t i = 0; i < p.lists; ++i) {
    const float* c = centroids.data() + i * head_dim;
    minus_half_squares.push_back(-0.5f * std::inner_product(c, c + head_dim, c, 0.0f));
  }
  const kernels::WeightMatrix w{centroids.data(), DType::kF32, p.lists, head_dim,
                                minus_half_squares.data()};
  Floats scratch(static_cast<size_t>(kernels::LinearScratchFloats(w)));
  std::vector<std::vector<uint32_t>> near(static_cast<size_t>(p.lists));
  std::vector<uint64_t> topk;
  std::vector<int64_t> order(static_cast<size_t>(std::min<int64_t>(p.lists, 64)));
  for (int64_t at = 0; at < p.lists; at += kScoredRows) {
    const int64_t count = std::min(kScoredRows, p.lists - at);
    kernels::Linear(centroids.data() + at * head_dim, count, head_dim, w, products.data(), p.lists,
                    scratch.data());
    for (int64_t i = 0; i < count; ++i) {
      float* scores = products.data() + i * p.lists;
      scores[at + i] = std::numeric_limits<float>::infinity();  // itself
      kernels::TopK(scores, p.lists, static_cast<int64_t>(order.size()), order.data(), topk);
      size_t rows = 0;
      for (const int64_t list : order) {
        if (rows >= kNearRows) break;
        near[static_cast<size_t>(at + i)].push_back(static_cast<uint32_t>(list));
        rows += p.List(list).size();
      }
    }
  }
  return near;
}

// The nearest rows of each row, by distance, best first: [rows, wanted], filled up with the row
// itself.
std::vector<uint32_t> NearestRows(const Rows& keys, const QueryMetric& metric, const Partition& p,
                                  int64_t wanted) {
  const int64_t d = keys.head_dim();
  const auto near = NearLists(p, metric, d);
  std::vector<uint32_t> nearest(static_cast<size_t>(keys.count() * wanted));
  std::vector<uint32_t> others;
  std::vector<uint64_t> topk;
  std::vector<int64_t> order(static_cast<size_t>(wanted) + 1);
  Floats x, c, minus_half_squares, products, scratch;
  for (int64_t list = 0; list < p.lists; ++list) {
    const absl::Span<const uint32_t> rows = p.List(list);
    for (size_t at = 0; at < rows.size(); at += kCellRows) {
      const absl::Span<const uint32_t> cell = rows.subspan(at, kCellRows);
      others.assign(cell.begin(), cell.end());
      for (const uint32_t other : near[static_cast<size_t>(list)]) {
        const absl::Span<const uint32_t> more = p.List(other);
        if (other == list) continue;
        const size_t room = 2 * kNearRows - std::min<size_t>(2 * kNearRows, others.size());
        others.insert(others.end(), more.begin(), more.begin() + std::min(room, more.size()));
      }
      const auto count = static_cast<int64_t>(others.size());
      metric.Gather(keys, cell, p.mean, x);
      metric.Gather(keys, others, p.mean, c);
      minus_half_squares.resize(others.size());
      for (int64_t i = 0; i < count; ++i) {
        const float* row = c.data() + i * d;
        minus_half_squares[static_cast<size_t>(i)] =
            -0.5f * std::inner_product(row, row + d, row, 0.0f);
      }
      const kernels::WeightMatrix w{c.data(), DType::kF32, count, d, minus_half_squares.data()};
      scratch.resize(static_cast<size_t>(kernels::LinearScratchFloats(w)));
      products.resize(cell.size() * others.size());
      kernels::Linear(x.data(), static_cast<int64_t>(cell.size()), d, w, products.data(), count,
                      scratch.data());
      for (size_t i = 0; i < cell.size(); ++i) {
        uint32_t* out = &nearest[cell[i] * static_cast<size_t>(wanted)];
        const int64_t found = kernels::TopK(products.data() + static_cast<int64_t>(i) * count,
                                            count, wanted + 1, order.data(), topk);
        int64_t written = 0;
        for (int64_t j = 0; j < found && written < wanted; ++j) {
          const uint32_t row = others[static_cast<size_t>(order[static_cast<size_t>(j)])];
          if (row != cell[i]) out[written++] = row;
        }
        std::fill(out + written, out + wanted, cell[i]);
      }
    }
  }
  return nearest;
}

class GraphBuilder {
 public:
  GraphBuilder(const Rows& keys, int64_t width)
      : keys_(keys),
        width_(width),
        links_(static_cast<size_t>(keys.count() * width)),
        degree_(static_cast<size_t>(keys.count())) {
    for (Position row = 0; row < keys.count(); ++row) {
      const void* address = keys.Address(row);
      squares_.push_back(kernels::DotBf16(address, address, keys.head_dim()));
    }
  }

  absl::Span<const int32_t> Links(uint32_t row) const {
    return {&links_[row * static_cast<size_t>(width_)], static_cast<size_t>(degree_[row])};
  }
  void AddQueryLinks(const Adjacency& candidates, int64_t most);
  void AddNearLinks(const std::vector<uint32_t>& nearest, int64_t wanted);
  void Connect(uint32_t entry);

 private:
  bool Has(uint32_t row, uint32_t link) const {
    const auto links = Links(row);
    return std::find(links.begin(), links.end(), static_cast<int32_t>(link)) != links.end();
  }
  bool Add(uint32_t row, uint32_t link) {
    if (row == link || degree_[row] >= width_ || Has(row, link)) return false;
    links_[row * static_cast<size_t>(width_) + static_cast<size_t>(degree_[row]++)] =
        static_cast<int32_t>(link);
    return true;
  }
  float Distance(uint32_t a, uint32_t b) const {
    return squares_[a] + squares_[b] -
           2 * kernels::DotBf16(keys_.Address(a), keys_.Address(b), keys_.head_dim());
  }
  void Spread(std::vector<uint32_t>& reached);
  void MakeRoom(uint32_t row, uint32_t link);

  const Rows& keys_;
  const int64_t width_;
  std::vector<int32_t> links_;   // [rows, width]
  std::vector<int32_t> degree_;  // [rows]
  Floats squares_;               // [rows]
  std::vector<int64_t> parent_;  // [rows]: from which a row was reached, -1 if it was not
};

void GraphBuilder::AddQueryLinks(const Adjacency& candidates, int64_t most) {
  for (uint32_t row = 0; row < keys_.count(); ++row) {
    for (const uint32_t link : candidates.Of(row)) {
      if (degree_[row] >= most) break;
      Add(row, link);
    }
  }
}

// A near row is linked unless it is nearer to a row linked before it; then the nearest of those
// left fill up half of the width, and links the other way what room there is.
void GraphBuilder::AddNearLinks(const std::vector<uint32_t>& nearest, int64_t wanted) {
  std::vector<std::vector<uint32_t>> kept(degree_.size());
  std::vector<uint32_t> occluded;
  for (uint32_t row = 0; row < keys_.count(); ++row) {
    const uint32_t* near = &nearest[row * static_cast<size_t>(wanted)];
    std::vector<uint32_t>& of_row = kept[row];
    occluded.clear();
    for (int64_t i = 0; i < wanted && static_cast<int64_t>(of_row.size()) < width_ / 2; ++i) {
      if (near[i] == row) break;
      const float distance = Distance(row, near[i]);
      const bool hidden = std::any_of(of_row.begin(), of_row.end(), [&](uint32_t other) {
        return Distance(other, near[i]) < distance;
      });
      (hidden ? occluded : of_row).push_back(near[i]);
    }
    for (const uint32_t other : occluded) {
      if (static_cast<int64_t>(of_row.size()) >= width_ / 2) break;
      of_row.push_back(other);
    }
    for (const uint32_t other : of_row) Add(row, other);
  }
  for (uint32_t row = 0; row < keys_.count(); ++row) {
    for (const uint32_t other : kept[row]) Add(other, row);
  }
}

// Marks what the rows reach that were not reached before.
void GraphBuilder::Spread(std::vector<uint32_t>& reached) {
  while (!reached.empty()) {
    const uint32_t row = reached.back();
    reached.pop_back();
    for (const int32_t link : Links(row)) {
      int64_t& parent = parent_[static_cast<size_t>(link)];
      if (parent >= 0) continue;
      parent = row;
      reached.push_back(static_cast<uint32_t>(link));
    }
  }
}

// Links row to link in place of the last link over which nothing was reached.
void GraphBuilder::MakeRoom(uint32_t row, uint32_t link) {
  for (int64_t i = width_ - 1; i >= 0; --i) {
    int32_t& old = links_[row * static_cast<size_t>(width_) + static_cast<size_t>(i)];
    if (parent_[static_cast<size_t>(old)] == row) continue;
    old = static_cast<int32_t>(link);
    return;
  }
}

// Every row is reached from the entry: rows that were not are linked from one near by in position
// that was and that can spare a link. There always is one: fewer links than rows reach something.
void GraphBuilder::Connect(uint32_t entry) {
  const auto rows = static_cast<uint32_t>(keys_.count());
  parent_.assign(rows, -1);
  parent_[entry] = entry;
  std::vector<uint32_t> reached{entry};
  Spread(reached);
  for (uint32_t row = 0; row < rows; ++row) {
    if (parent_[row] >= 0) continue;
    uint32_t from = row;
    const auto spare = [&] {
      if (parent_[from] < 0) return false;
      if (degree_[from] < width_) return true;
      const auto links = Links(from);
      return std::any_of(links.begin(), links.end(),
                         [&](int32_t link) { return parent_[static_cast<size_t>(link)] != from; });
    };
    do from = (from == 0 ? rows : from) - 1;
    while (!spare());
    if (!Add(from, row)) MakeRoom(from, row);
    parent_[row] = from;
    reached.push_back(row);
    Spread(reached);
  }
}

}  // namespace

absl::StatusOr<std::string> BuildGraph(const IndexParams& params, const Rows& keys,
                                       const SampledQueries* queries, Accelerator* accelerator) {
  if (queries == nullptr || (queries->samples() == 0 && keys.count() > 0)) {
    return absl::InvalidArgumentError("graph: is built from sampled queries, and there are none");
  }
  if (queries->head_dim != keys.head_dim() || queries->group < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("graph: ", queries->group, " queries of head_dim ", queries->head_dim,
                     " a sample, for keys of head_dim ", keys.head_dim()));
  }
  if (keys.count() > kMaxHnswRows) {
    return absl::InvalidArgumentError(
        absl::StrCat("graph: ", keys.count(), " rows, must be at most ", kMaxHnswRows));
  }
  RETURN_IF_ERROR(keys.Verify({0, keys.count()}));
  HnswLinks::Header header{
      .rows = keys.count(), .head_dim = keys.head_dim(), .m = params.m, .ef_construction = 0};
  ASSIGN_OR_RETURN(header.rows_crc, RowsCrc(keys));
  const int64_t width = 2 * params.m;
  GraphBuilder graph(keys, width);
  if (keys.count() > 0) {
    const QueryMetric metric(queries, keys.head_dim());
    ASSIGN_OR_RETURN(const auto ranked,
                     RankKeys(keys, Choose(*queries, keys.count()), accelerator));
    ASSIGN_OR_RETURN(const Partition partition,
                     MakePartition(keys, metric, IvfLists(0, keys.count()), accelerator));
    graph.AddQueryLinks(QueryLinks(ranked, keys.count()), width / 2);
    graph.AddNearLinks(NearestRows(keys, metric, partition, width), width);
    header.levels = 1;
    // Of the last query, which saw the most.
    header.entry = ranked.back().empty() ? 0 : ranked.back().front().second;
    graph.Connect(header.entry);
  }
  return HnswLinks::Encode(
      header, [&graph](int64_t row, int32_t) { return graph.Links(static_cast<uint32_t>(row)); },
      [](int64_t) { return 1; });
}

}  // namespace carrel::kvstore
