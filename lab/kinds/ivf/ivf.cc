#include "lab/kinds/ivf/ivf.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/search_util.h"
#include "lab/kinds/ivf/ivf_blob.h"

namespace carrel::kvstore {
namespace {

// A row scored where it lies costs as much as this many rows read in order: from a quarter of the
// zone on, reading all of it is cheaper.
constexpr int64_t kScanRowsPerRow = 4;

class IvfIndex : public Index {
 public:
  IvfIndex(const IndexParams& params, IvfBlob blob, Rows keys)
      : probes_(EffortOf(params, 0, keys.count())),
        blob_(std::move(blob)),
        keys_(std::move(keys)) {}

  IndexKind kind() const override { return IndexKind::kIvf; }
  int64_t resident_bytes() const override { return blob_.resident_bytes(); }
  absl::Status Search(const SearchRequest& request, SearchScratch& scratch,
                      SearchResult& result) const override;

 private:
  absl::Span<const uint32_t> ListInZone(int64_t list, RowRange zone) const;
  // Estimates in scratch.scores [group, lists], -inf for lists without rows in the zone; the lse
  // over them in scratch.base; ln of how many rows of the zone a list has in scratch.log_sizes.
  void ScoreLists(const SearchRequest& request, SearchScratch& scratch) const;
  // Leaves the best lists in scratch.best and their rows in the zone, ascending, in scratch.ids.
  void ProbeLists(const SearchRequest& request, int64_t probes, SearchScratch& scratch) const;
  // lse over the lists in scratch.scores.
  float LseOfLists(int64_t head, SearchScratch& scratch) const;

  const int64_t probes_;
  const IvfBlob blob_;
  const Rows keys_;
};

absl::Span<const uint32_t> IvfIndex::ListInZone(int64_t list, RowRange zone) const {
  const absl::Span<const uint32_t> rows = blob_.List(list);
  if (rows.empty() || (rows.front() >= zone.begin && rows.back() < zone.end)) return rows;
  const auto begin = std::lower_bound(rows.begin(), rows.end(), zone.begin);
  const auto end = std::lower_bound(begin, rows.end(), zone.end);
  return rows.subspan(static_cast<size_t>(begin - rows.begin()), static_cast<size_t>(end - begin));
}

float IvfIndex::LseOfLists(int64_t head, SearchScratch& scratch) const {
  const int64_t lists = blob_.header().lists;
  scratch.group_scores.resize(static_cast<size_t>(lists));
  const float* scores = scratch.scores.data() + head * lists;
  for (int64_t i = 0; i < lists; ++i) {
    scratch.group_scores[static_cast<size_t>(i)] =
        scores[i] + scratch.log_sizes[static_cast<size_t>(i)];
  }
  return kernels::LogSumExp(scratch.group_scores.data(), lists);
}

void IvfIndex::ScoreLists(const SearchRequest& r, SearchScratch& s) const {
  const int64_t lists = blob_.header().lists, d = keys_.head_dim();
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  s.log_sizes.resize(static_cast<size_t>(lists));
  for (int64_t i = 0; i < lists; ++i) {
    const size_t rows = ListInZone(i, r.zone).size();
    s.log_sizes[static_cast<size_t>(i)] = rows == 0 ? kNone : std::log(static_cast<float>(rows));
  }
  s.scores.resize(static_cast<size_t>(r.group * lists));
  kernels::DotScore(r.queries, r.group, d, blob_.centroids(), lists, r.scale, s.scores.data(),
                    lists);
  s.base.resize(static_cast<size_t>(r.group));
  for (int64_t h = 0; h < r.group; ++h) {
    const float* q = r.queries + h * d;
    float norm = 0, on_mean = 0;
    for (int64_t c = 0; c < d; ++c) {
      norm += q[c] * q[c];
      on_mean += q[c] * blob_.mean()[c];
    }
    const float half = 0.5f * r.scale * r.scale * norm;
    float* scores = s.scores.data() + h * lists;
    for (int64_t i = 0; i < lists; ++i) {
      const bool none = s.log_sizes[static_cast<size_t>(i)] == kNone;
      scores[i] = none ? kNone : scores[i] + r.scale * on_mean + half * blob_.spreads()[i];
    }
    s.base[static_cast<size_t>(h)] = LseOfLists(h, s);
  }
}

void IvfIndex::ProbeLists(const SearchRequest& r, int64_t probes, SearchScratch& s) const {
  const int64_t lists = blob_.header().lists, wanted = std::min(r.top_k, r.zone.rows());
  s.group_scores.resize(static_cast<size_t>(lists));
  kernels::GroupScore(s.scores.data(), r.group, lists, lists, s.base.data(), s.group_scores.data());
  int64_t found = 0;
  for (probes = std::min(probes, lists);; probes = std::min(2 * probes, lists)) {
    s.best.resize(static_cast<size_t>(probes));
    kernels::TopK(s.group_scores.data(), lists, probes, s.best.data(), s.topk);
    found = 0;
    for (const int64_t list : s.best) {
      found += static_cast<int64_t>(ListInZone(list, r.zone).size());
    }
    if (found >= wanted || probes == lists) break;
  }
  // In the order of the zone by way of a bit per row: sorting took a third of a search.
  s.marked.assign(static_cast<size_t>(r.zone.rows() + 63) / 64, 0);
  for (const int64_t list : s.best) {
    for (const uint32_t row : ListInZone(list, r.zone)) {
      const auto at = static_cast<uint64_t>(row - r.zone.begin);
      s.marked[at / 64] |= uint64_t{1} << at % 64;
    }
  }
  s.ids.clear();
  s.ids.reserve(static_cast<size_t>(found));
  for (size_t word = 0; word < s.marked.size(); ++word) {
    for (uint64_t bits = s.marked[word]; bits != 0; bits &= bits - 1) {
      s.ids.push_back(r.zone.begin + static_cast<int64_t>(64 * word) + std::countr_zero(bits));
    }
  }
}

absl::Status IvfIndex::Search(const SearchRequest& request, SearchScratch& s,
                              SearchResult& result) const {
  RETURN_IF_ERROR(ValidateRequest(request, keys_));
  const int64_t probes = request.effort > 0 ? request.effort : probes_;
  const int64_t lists = blob_.header().lists, zone = request.zone.rows();
  const int64_t probed_rows = lists == 0 ? 0 : probes * zone / lists;
  if (zone <= lists + kScanRowsPerRow * std::max(probed_rows, request.top_k)) {
    return ScanZone(request, keys_, s, result);
  }
  ScoreLists(request, s);
  ProbeLists(request, probes, s);
  // The best lists are longer than most.
  const auto found = static_cast<int64_t>(s.ids.size());
  if (zone <= lists + kScanRowsPerRow * found) return ScanZone(request, keys_, s, result);
  for (int64_t h = 0; h < request.group; ++h) {
    for (const int64_t list : s.best) {
      s.scores[static_cast<size_t>(h * lists + list)] = -std::numeric_limits<float>::infinity();
    }
    s.base[static_cast<size_t>(h)] = LseOfLists(h, s);
  }
  RETURN_IF_ERROR(ScoreIds(request, keys_, s));
  for (int64_t h = 0; h < request.group; ++h) {
    const float of_found = kernels::LogSumExp(s.scores.data() + h * found, found);
    const float others = s.base[static_cast<size_t>(h)];
    const float more = std::max(of_found, others), less = std::min(of_found, others);
    s.base[static_cast<size_t>(h)] = more + std::log1p(std::exp(less - more));
  }
  SelectBest(
      request, s.scores.data(), found, s.base.data(),
      [&s](int64_t i) { return s.ids[static_cast<size_t>(i)]; }, s, result);
  result.zone_lse = s.base;
  result.zone_scored = false;
  result.visited = request.group * (lists + found);
  return absl::OkStatus();
}

}  // namespace

int64_t IvfLists(int64_t asked_lists, int64_t rows) {
  const auto usual = static_cast<int64_t>(4 * std::sqrt(static_cast<double>(rows)));
  return std::min(
      {asked_lists > 0 ? asked_lists : std::max<int64_t>(usual, 1), rows, kMaxIvfLists});
}

absl::StatusOr<std::string> BuildIvf(const IndexParams& params, const Rows& keys,
                                     const SampledQueries* queries, Accelerator* accelerator) {
  if (keys.count() > kMaxIvfRows || keys.head_dim() > kMaxIvfHeadDim) {
    return absl::InvalidArgumentError(absl::StrCat("ivf: ", keys.count(), " rows of ",
                                                   keys.head_dim(), ", must be at most ",
                                                   kMaxIvfRows, " of ", kMaxIvfHeadDim));
  }
  IvfHeader header{.rows = keys.count(),
                   .head_dim = keys.head_dim(),
                   .lists = IvfLists(params.ivf_lists, keys.count()),
                   .asked_lists = params.ivf_lists};
  if (queries != nullptr && queries->head_dim != keys.head_dim()) {
    return absl::InvalidArgumentError(absl::StrCat("ivf: queries of head_dim ", queries->head_dim,
                                                   " for keys of head_dim ", keys.head_dim()));
  }
  const QueryMetric metric(queries, keys.head_dim());
  ASSIGN_OR_RETURN(const Partition partition,
                   MakePartition(keys, metric, header.lists, accelerator));
  ASSIGN_OR_RETURN(header.rows_crc, RowsCrc(keys));
  return EncodeIvfBlob(header, partition);
}

absl::StatusOr<std::unique_ptr<Index>> OpenIvf(const IndexParams& params, const Blob& blob,
                                               Rows keys) {
  ASSIGN_OR_RETURN(std::string bytes, blob.Read());
  ASSIGN_OR_RETURN(IvfBlob opened, IvfBlob::Open(std::move(bytes)));
  const IvfHeader& header = opened.header();
  if (header.asked_lists != params.ivf_lists) {
    return absl::InvalidArgumentError(
        absl::StrCat("ivf blob was built with ivf_lists=", header.asked_lists,
                     ", not ivf_lists=", params.ivf_lists));
  }
  RETURN_IF_ERROR(CheckBuiltOver("ivf", header.rows, header.head_dim, header.rows_crc, keys));
  return std::make_unique<IvfIndex>(params, std::move(opened), std::move(keys));
}

}  // namespace carrel::kvstore
