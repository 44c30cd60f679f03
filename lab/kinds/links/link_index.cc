#include "lab/kinds/links/link_index.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kvstore/index/search_util.h"

namespace carrel::kvstore {
namespace {

// Rows of the zone that stand for those that no walk keeps, when lse is estimated; the same ones in
// every search of a zone, so that they stay in the cache. At 512 the group's best 128 are 97-98%
// the exact ones where lse over the met rows alone gives 90% (registry-8k, docs/decisions).
constexpr int64_t kLseSamples = 512;
// A walk compares many rows per row that it keeps, each somewhere else: from this share of the zone
// on, reading all of it in order is cheaper.
constexpr int64_t kScanRowsPerEf = 4;
// Rows outside the zone lead the walk but are not kept: in a narrow zone it would wander.
constexpr int64_t kScanZoneShare = 8;

using Scored = std::pair<float, uint32_t>;

// Rows about to be compared with one query.
struct Batch {
  int64_t count = 0;
  uint32_t rows[2 * kMaxHnswM];
  const void* addresses[2 * kMaxHnswM];
  float scores[2 * kMaxHnswM];
};

// One row in each of kLseSamples equal stretches of the zone, at places that do not repeat.
Position SampledRow(RowRange zone, int64_t i) {
  constexpr double kGoldenRatio = 0.6180339887498949;
  const double stretch = static_cast<double>(zone.rows()) / kLseSamples;
  const double turn = static_cast<double>(i) * kGoldenRatio;
  const auto at =
      static_cast<int64_t>((static_cast<double>(i) + turn - std::floor(turn)) * stretch);
  return zone.begin + std::min(at, zone.rows() - 1);
}

class LinkIndex : public Index {
 public:
  LinkIndex(const IndexParams& params, HnswLinks links, Rows keys)
      : params_(params), links_(std::move(links)), keys_(std::move(keys)) {}

  IndexKind kind() const override { return params_.kind; }
  int64_t resident_bytes() const override { return links_.resident_bytes(); }
  absl::Status Search(const SearchRequest& request, SearchScratch& scratch,
                      SearchResult& result) const override;

 private:
  absl::Status Score(const SearchRequest& request, const float* query, Batch& batch) const;
  absl::StatusOr<Scored> Descend(const SearchRequest& request, const float* query, Batch& batch,
                                 int64_t& visited) const;
  // Leaves the best rows of the zone in scratch.beam. samples: scores of the sample of the zone.
  absl::Status Walk(const SearchRequest& request, const float* query, int64_t ef,
                    const float* samples, SearchScratch& scratch, int64_t& visited) const;
  absl::Status ScoreSamples(const SearchRequest& request, SearchScratch& scratch) const;

  const IndexParams params_;
  const HnswLinks links_;
  const Rows keys_;
};

absl::Status LinkIndex::Score(const SearchRequest& request, const float* query,
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
absl::StatusOr<Scored> LinkIndex::Descend(const SearchRequest& request, const float* query,
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

absl::Status LinkIndex::Walk(const SearchRequest& request, const float* query, int64_t ef,
                             const float* samples, SearchScratch& scratch, int64_t& visited) const {
  Batch batch;
  ASSIGN_OR_RETURN(const Scored start, Descend(request, query, batch, visited));
  const uint32_t mark = scratch.NextWalk(keys_.count());
  std::vector<Scored>& frontier = scratch.frontier;  // the best first
  std::vector<Scored>& beam = scratch.beam;          // the worst first
  frontier.clear();
  beam.clear();
  const auto meet = [&](const Scored& met) {
    const bool full = static_cast<int64_t>(beam.size()) >= ef;
    if (full && !(met.first > beam.front().first)) return;
    frontier.push_back(met);
    std::push_heap(frontier.begin(), frontier.end());
    // Rows outside the zone lead on, but take no place.
    if (met.second < request.zone.begin || met.second >= request.zone.end) return;
    if (full) {
      std::pop_heap(beam.begin(), beam.end(), std::greater<>());
      beam.pop_back();
    }
    beam.push_back(met);
    std::push_heap(beam.begin(), beam.end(), std::greater<>());
  };
  scratch.visited[start.second] = mark;
  meet(start);
  for (int64_t i = 0; i < kLseSamples; ++i) {
    const auto row = static_cast<uint32_t>(SampledRow(request.zone, i));
    uint32_t& last_visit = scratch.visited[row];
    if (last_visit == mark) continue;
    last_visit = mark;
    meet({samples[i], row});
  }
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

absl::Status LinkIndex::ScoreSamples(const SearchRequest& request, SearchScratch& scratch) const {
  scratch.ids.clear();
  for (int64_t i = 0; i < kLseSamples; ++i) scratch.ids.push_back(SampledRow(request.zone, i));
  return ScoreIds(request, keys_, scratch);
}

// ln of the sum over the zone: what the walk kept counts itself, what is below that by its sample.
float EstimateLse(const std::vector<Scored>& beam, const float* samples, int64_t zone,
                  std::vector<float>& scratch) {
  if (beam.empty()) return 0;  // no candidate of this head: any base will do
  scratch.clear();
  for (const Scored& kept : beam) scratch.push_back(kept.first);
  const float kept = kernels::LogSumExp(scratch.data(), static_cast<int64_t>(scratch.size()));
  double rest = 0;
  for (int64_t i = 0; i < kLseSamples; ++i) {
    if (samples[i] < beam.front().first) rest += std::exp(double{samples[i]} - double{kept});
  }
  return kept + static_cast<float>(std::log1p(rest * static_cast<double>(zone) / kLseSamples));
}

absl::Status LinkIndex::Search(const SearchRequest& request, SearchScratch& scratch,
                               SearchResult& result) const {
  RETURN_IF_ERROR(ValidateRequest(request, keys_));
  const int64_t ef = std::max(EffortOf(request, params_, keys_.count()), request.top_k);
  const int64_t zone = request.zone.rows();
  if (zone <= std::max(ef * kScanRowsPerEf, keys_.count() / kScanZoneShare)) {
    return ScanZone(request, keys_, scratch, result);
  }
  RETURN_IF_ERROR(ScoreSamples(request, scratch));
  result.visited = kLseSamples * request.group;
  result.zone_scored = false;
  scratch.ids.clear();
  scratch.base.resize(static_cast<size_t>(request.group));
  for (int64_t h = 0; h < request.group; ++h) {
    const float* samples = scratch.scores.data() + h * kLseSamples;
    RETURN_IF_ERROR(Walk(request, request.queries + h * keys_.head_dim(), ef, samples, scratch,
                         result.visited));
    scratch.base[static_cast<size_t>(h)] =
        EstimateLse(scratch.beam, samples, zone, scratch.group_scores);
    for (const Scored& scored : scratch.beam) scratch.ids.push_back(scored.second);
  }
  std::sort(scratch.ids.begin(), scratch.ids.end());
  scratch.ids.erase(std::unique(scratch.ids.begin(), scratch.ids.end()), scratch.ids.end());
  RETURN_IF_ERROR(ScoreIds(request, keys_, scratch));
  SelectBest(
      request, scratch.scores.data(), static_cast<int64_t>(scratch.ids.size()), scratch.base.data(),
      [&scratch](int64_t i) { return scratch.ids[static_cast<size_t>(i)]; }, scratch, result);
  result.zone_lse = scratch.base;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Index>> LinkType::Open(const IndexParams& params, Blob blob,
                                                      Rows keys) const {
  ASSIGN_OR_RETURN(std::string bytes, blob.Read());
  ASSIGN_OR_RETURN(HnswLinks links, HnswLinks::Open(std::move(bytes)));
  const HnswLinks::Header& header = links.header();
  const int64_t asked = params.kind == IndexKind::kGraph ? 0 : params.ef_construction;
  if (header.m != params.m || header.ef_construction != asked ||
      (asked == 0 && header.levels > 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        name(), " blob was built with m=", header.m, " ef_construction=", header.ef_construction,
        " levels=", header.levels, ", not m=", params.m, " ef_construction=", asked));
  }
  RETURN_IF_ERROR(CheckBuiltOver(IndexKindName(params.kind), header.rows, header.head_dim,
                                 header.rows_crc, keys));
  return std::make_unique<LinkIndex>(params, std::move(links), std::move(keys));
}

}  // namespace carrel::kvstore
