// What:   what the index kinds share: request checks, and the exact scan of a zone.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

// What a blob says of the rows that it was built over, held against these. InvalidArgument other shapes, DataLoss other
// rows (RowsCrc).
absl::Status CheckBuiltOver(absl::string_view kind, int64_t rows, int64_t head_dim,
                            uint32_t rows_crc, const Rows& keys, int64_t checked = kCheckedRows);

absl::Status ValidateRequest(const SearchRequest& request, const Rows& keys);
inline int64_t EffortOf(const SearchRequest& request, const IndexParams& params, int64_t rows) {
  return request.effort > 0 ? request.effort : EffortOf(params, request.top_k, rows);
}

// Parts of a range, `part` long but for the last, on the pool's threads where there is one. One of the
// errors, if there are any.
absl::Status ForEachPart(ThreadPool* pool, RowRange range, int64_t part,
                         absl::FunctionRef<absl::Status(RowRange)> body);

// scores [vectors, zone rows] = scale <queries[i], key>, queries [vectors, head_dim]; on the pool's threads
// where there is one. Cost: reads the zone once, whatever the vectors.
absl::Status ScoreZone(const float* queries, int64_t vectors, float scale, const Rows& keys,
                       RowRange zone, ThreadPool* pool, float* scores);

// Scores every row of the zone. Cost: reads the zone once for the whole group.
absl::Status ScanZone(const SearchRequest& request, const Rows& keys, SearchScratch& scratch,
                      SearchResult& result);

// Scores n rows for every head of the group: scores [group, n]. Uses scratch.pointers.
template <typename Id>
absl::Status ScoreRows(const SearchRequest& request, const Rows& keys, const Id* ids, int64_t n,
                       SearchScratch& scratch, float* scores);
// The same of scratch.ids into scratch.scores.
absl::Status ScoreIds(const SearchRequest& request, const Rows& keys, SearchScratch& scratch);

// From scores [group, rows] of rows whose ids ascend, with base [group] (kernels/score/group_score): the
// top_k best into result.ids and result.scores. Uses scratch.group_scores, .best, .topk.
template <typename IdOf>
void SelectBest(const SearchRequest& request, const float* scores, int64_t rows, const float* base,
                IdOf id_of, SearchScratch& scratch, SearchResult& result);

// The same from scratch.group_scores, of rows whose ids ascend; score_of(h, i).
template <typename IdOf, typename ScoreOf>
void TakeBest(const SearchRequest& request, IdOf id_of, ScoreOf score_of, SearchScratch& scratch,
              SearchResult& result);

}  // namespace carrel::kvstore

#include <algorithm>
#include <cmath>

#include "common/status.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"

namespace carrel::kvstore {

template <typename Id>
absl::Status ScoreRows(const SearchRequest& request, const Rows& keys, const Id* ids, int64_t n,
                       SearchScratch& scratch, float* scores) {
  RETURN_IF_ERROR(keys.VerifyRows(ids, n));
  scratch.pointers.resize(static_cast<size_t>(n));
  for (size_t i = 0; i < scratch.pointers.size(); ++i) scratch.pointers[i] = keys.Address(ids[i]);
  kernels::DotScoreRows(request.queries, request.group, keys.head_dim(), scratch.pointers.data(), n,
                        request.scale, scores, n, request.pool);
  return absl::OkStatus();
}

template <typename IdOf, typename ScoreOf>
void TakeBest(const SearchRequest& request, IdOf id_of, ScoreOf score_of, SearchScratch& scratch,
              SearchResult& result) {
  const auto rows = static_cast<int64_t>(scratch.group_scores.size());
  scratch.best.resize(static_cast<size_t>(std::min(request.top_k, rows)));
  const auto top_k = request.by_id ? kernels::TopKAscending : kernels::TopK;
  const int64_t found =
      top_k(scratch.group_scores.data(), rows, static_cast<int64_t>(scratch.best.size()),
            scratch.best.data(), scratch.topk);
  result.ids.resize(static_cast<size_t>(found));
  result.scores.resize(static_cast<size_t>(request.group * found));
  result.least = found == 0 ? 0 : INFINITY;
  for (int64_t i = 0; i < found; ++i) {
    const int64_t at = scratch.best[static_cast<size_t>(i)];
    result.ids[static_cast<size_t>(i)] = id_of(at);
    result.least = std::min(result.least, scratch.group_scores[static_cast<size_t>(at)]);
  }
  for (int64_t h = 0; h < request.group; ++h) {
    float* const to = result.scores.data() + h * found;
    for (int64_t i = 0; i < found; ++i) to[i] = score_of(h, scratch.best[static_cast<size_t>(i)]);
  }
}

template <typename IdOf>
void SelectBest(const SearchRequest& request, const float* scores, int64_t rows, const float* base,
                IdOf id_of, SearchScratch& scratch, SearchResult& result) {
  scratch.group_scores.resize(static_cast<size_t>(rows));
  kernels::GroupScore(scores, request.group, rows, rows, base, scratch.group_scores.data());
  TakeBest(
      request, id_of, [&](int64_t h, int64_t i) { return scores[h * rows + i]; }, scratch, result);
}

}  // namespace carrel::kvstore
