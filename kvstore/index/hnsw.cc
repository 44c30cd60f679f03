#include "kvstore/index/hnsw.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/dot_score/dot_score.h"
#include "kvstore/index/hnsw_links.h"
#include "kvstore/index/search_util.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kMaxLinks = 2048;
// A walk compares many rows per row that it keeps, each somewhere else: from this share of the zone
// on, reading all of it in order is cheaper.
constexpr int64_t kScanRowsPerEf = 4;
// Rows outside the zone lead the walk but are not kept: in a narrow zone it would wander.
constexpr int64_t kScanZoneShare = 8;

using Scored = std::pair<float, uint32_t>;

class HnswIndex : public Index {
 public:
  HnswIndex(const IndexParams& params, HnswLinks links, Rows keys)
      : ef_search_(params.ef_search), links_(std::move(links)), keys_(std::move(keys)) {}

  IndexKind kind() const override { return IndexKind::kHnsw; }
  int64_t resident_bytes() const override { return links_.resident_bytes(); }
  absl::Status Search(const SearchRequest& request, SearchScratch& scratch,
                      SearchResult& result) const override;

 private:
  // Scores the rows at the end of `links` that this walk has not visited; marks them. Returns how
  // many, with their ids and scores in the arrays.
  struct Batch {
    int64_t count = 0;
    uint32_t rows[kMaxLinks];
    const void* addresses[kMaxLinks];
    float scores[kMaxLinks];
  };
  absl::Status Score(const SearchRequest& request, const float* query, Batch& batch) const;
  absl::StatusOr<Scored> Descend(const SearchRequest& request, const float* query, Batch& batch,
                                 int64_t& visited) const;
  // Leaves the best rows of the zone in scratch.beam, and the scores of all the zone's rows that it
  // met in scratch.misc.
  absl::Status Walk(const SearchRequest& request, const float* query, int64_t ef, Batch& batch,
                    SearchScratch& scratch, int64_t& visited) const;
  absl::Status ScoreUnion(const SearchRequest& request, SearchScratch& scratch) const;

  const int32_t ef_search_;
  const HnswLinks links_;
  const Rows keys_;
};

absl::Status HnswIndex::Score(const SearchRequest& request, const float* query,
                              Batch& batch) const {
  for (int64_t i = 0; i < batch.count; ++i) {
    batch.addresses[i] = keys_.Address(batch.rows[i]);
    __builtin_prefetch(batch.addresses[i]);
  }
  for (int64_t i = 0; i < batch.count; ++i) RETURN_IF_ERROR(keys_.VerifyRow(batch.rows[i]));
  kernels::DotScoreRows(query, 1, keys_.head_dim(), batch.addresses, batch.count, request.scale,
                        batch.scores, batch.count);
  return absl::OkStatus();
}

// Greedy on the upper levels: from each row to its best link while that is better.
absl::StatusOr<Scored> HnswIndex::Descend(const SearchRequest& request, const float* query,
                                          Batch& batch, int64_t& visited) const {
  batch.count = 1;
  batch.rows[0] = links_.header().entry;
  RETURN_IF_ERROR(Score(request, query, batch));
  ++visited;
  Scored best{batch.scores[0], batch.rows[0]};
  for (int32_t level = links_.header().levels - 1; level > 0; --level) {
    for (bool better = true; better;) {
      better = false;
      batch.count = 0;
      for (const int32_t link : links_.Upper(best.second, level)) {
        if (link < 0) break;
        batch.rows[batch.count++] = static_cast<uint32_t>(link);
      }
      RETURN_IF_ERROR(Score(request, query, batch));
      visited += batch.count;
      for (int64_t i = 0; i < batch.count; ++i) {
        if (batch.scores[i] > best.first) {
          best = {batch.scores[i], batch.rows[i]};
          better = true;
        }
      }
    }
  }
  return best;
}

absl::Status HnswIndex::Walk(const SearchRequest& request, const float* query, int64_t ef,
                             Batch& batch, SearchScratch& scratch, int64_t& visited) const {
  ASSIGN_OR_RETURN(const Scored start, Descend(request, query, batch, visited));
  const uint32_t mark = scratch.NextWalk(keys_.count());
  std::vector<Scored>& frontier = scratch.frontier;  // the best first
  std::vector<Scored>& beam = scratch.beam;          // the worst first
  frontier.clear();
  beam.clear();
  scratch.misc.clear();
  const auto meet = [&](const Scored& met) {
    const bool in_zone = met.second >= request.zone.begin && met.second < request.zone.end;
    if (in_zone) scratch.misc.push_back(met.first);
    const bool full = static_cast<int64_t>(beam.size()) >= ef;
    if (full && !(met.first > beam.front().first)) return;
    frontier.push_back(met);
    std::push_heap(frontier.begin(), frontier.end());
    if (!in_zone) return;
    if (full) {
      std::pop_heap(beam.begin(), beam.end(), std::greater<>());
      beam.pop_back();
    }
    beam.push_back(met);
    std::push_heap(beam.begin(), beam.end(), std::greater<>());
  };
  scratch.visited[start.second] = mark;
  meet(start);
  while (!frontier.empty()) {
    const Scored nearest = frontier.front();
    if (static_cast<int64_t>(beam.size()) >= ef && nearest.first < beam.front().first) break;
    std::pop_heap(frontier.begin(), frontier.end());
    frontier.pop_back();
    batch.count = 0;
    for (const int32_t link : links_.Level0(nearest.second)) {
      if (link < 0) break;
      uint32_t& last_visit = scratch.visited[static_cast<size_t>(link)];
      if (last_visit == mark) continue;
      last_visit = mark;
      batch.rows[batch.count++] = static_cast<uint32_t>(link);
    }
    RETURN_IF_ERROR(Score(request, query, batch));
    visited += batch.count;
    for (int64_t i = 0; i < batch.count; ++i) meet({batch.scores[i], batch.rows[i]});
  }
  return absl::OkStatus();
}

// Scores the rows in scratch.ids for every head of the group.
absl::Status HnswIndex::ScoreUnion(const SearchRequest& request, SearchScratch& scratch) const {
  const int64_t rows = static_cast<int64_t>(scratch.ids.size());
  scratch.pointers.resize(scratch.ids.size());
  for (size_t i = 0; i < scratch.ids.size(); ++i) {
    scratch.pointers[i] = keys_.Address(scratch.ids[i]);  // verified by the walk that found it
  }
  scratch.scores.resize(static_cast<size_t>(request.group * rows));
  kernels::DotScoreRows(request.queries, request.group, keys_.head_dim(), scratch.pointers.data(),
                        rows, request.scale, scratch.scores.data(), rows);
  return absl::OkStatus();
}

absl::Status HnswIndex::Search(const SearchRequest& request, SearchScratch& scratch,
                               SearchResult& result) const {
  RETURN_IF_ERROR(ValidateRequest(request, keys_));
  const int64_t wanted_ef = request.ef_search > 0 ? request.ef_search : ef_search_;
  const int64_t ef = std::max(wanted_ef, request.top_k);
  const int64_t zone = request.zone.rows();
  if (zone <= std::max(ef * kScanRowsPerEf, keys_.count() / kScanZoneShare)) {
    return ScanZone(request, keys_, scratch, result);
  }
  result.visited = 0;
  result.zone_lse.clear();
  scratch.ids.clear();
  std::vector<float> base(static_cast<size_t>(request.group));
  auto batch = std::make_unique<Batch>();
  for (int64_t h = 0; h < request.group; ++h) {
    RETURN_IF_ERROR(
        Walk(request, request.queries + h * keys_.head_dim(), ef, *batch, scratch, result.visited));
    base[static_cast<size_t>(h)] =
        kernels::LogSumExp(scratch.misc.data(), static_cast<int64_t>(scratch.misc.size()));
    for (const Scored& scored : scratch.beam) scratch.ids.push_back(scored.second);
  }
  std::sort(scratch.ids.begin(), scratch.ids.end());
  scratch.ids.erase(std::unique(scratch.ids.begin(), scratch.ids.end()), scratch.ids.end());
  RETURN_IF_ERROR(ScoreUnion(request, scratch));
  SelectBest(
      request, scratch.scores.data(), static_cast<int64_t>(scratch.ids.size()), base.data(),
      [&scratch](int64_t i) { return scratch.ids[static_cast<size_t>(i)]; }, scratch, result);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Index>> OpenHnsw(const IndexParams& params, std::string blob,
                                                Rows keys) {
  ASSIGN_OR_RETURN(HnswLinks links, HnswLinks::Open(std::move(blob)));
  const HnswLinks::Header& header = links.header();
  if (header.m != params.m || header.ef_construction != params.ef_construction) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hnsw blob was built with m=", header.m, " ef_construction=", header.ef_construction,
        ", not m=", params.m, " ef_construction=", params.ef_construction));
  }
  if (header.rows != keys.count() || header.head_dim != keys.head_dim()) {
    return absl::InvalidArgumentError(absl::StrCat("hnsw blob is of ", header.rows, " rows of ",
                                                   header.head_dim, ", not ", keys.count(), " of ",
                                                   keys.head_dim()));
  }
  ASSIGN_OR_RETURN(const uint32_t crc, RowsCrc(keys));
  if (crc != header.rows_crc) {
    return absl::DataLossError("hnsw blob was built over other rows of the same shape");
  }
  return std::make_unique<HnswIndex>(params, std::move(links), std::move(keys));
}

}  // namespace carrel::kvstore
