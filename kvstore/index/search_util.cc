#include "kvstore/index/search_util.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "common/thrown.h"
#include "kernels/score/dot_score/dot_score.h"

namespace carrel::kvstore {
namespace {

// Rows verified, then scored while they are still in the cache.
constexpr int64_t kScanBlockBytes = 256 << 10;

}  // namespace

absl::Status ForEachPart(ThreadPool* pool, RowRange range, int64_t part,
                         absl::FunctionRef<absl::Status(RowRange)> body) {
  const auto at = [&](int64_t i) -> RowRange {
    const Position begin = range.begin + i * part;
    return {begin, std::min(range.end, begin + part)};
  };
  const int64_t parts = (range.rows() + part - 1) / part;
  if (pool == nullptr || parts == 1) {
    for (int64_t i = 0; i < parts; ++i) RETURN_IF_ERROR(body(at(i)));
    return absl::OkStatus();
  }
  std::vector<absl::Status> statuses(static_cast<size_t>(parts));
  pool->ParallelFor(parts, [&](int64_t i) {
    statuses[static_cast<size_t>(i)] = CatchThrown("search", [&] { return body(at(i)); });
  });
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::Status CheckBuiltOver(absl::string_view kind, int64_t rows, int64_t head_dim,
                            uint32_t rows_crc, const Rows& keys, int64_t checked) {
  if (rows != keys.count() || head_dim != keys.head_dim()) {
    return absl::InvalidArgumentError(absl::StrCat(kind, " blob is of ", rows, " rows of ",
                                                   head_dim, ", not ", keys.count(), " of ",
                                                   keys.head_dim()));
  }
  ASSIGN_OR_RETURN(const uint32_t crc, RowsCrc(keys, checked));
  if (crc == rows_crc) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(kind, " blob was built over other rows of the same shape"));
}

absl::Status ValidateRequest(const SearchRequest& request, const Rows& keys) {
  if (request.queries == nullptr || request.group < 1 || request.group > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("search: group=", request.group, ", must be 1 .. 4096 queries"));
  }
  if (!(request.scale > 0) || !std::isfinite(request.scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("search: scale=", request.scale, ", must be positive"));
  }
  if (request.top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("search: top_k=", request.top_k, ", must not be negative"));
  }
  if (request.zone.begin < 0 || request.zone.begin > request.zone.end ||
      request.zone.end > keys.count()) {
    return absl::InvalidArgumentError(absl::StrCat("search: zone [", request.zone.begin, ", ",
                                                   request.zone.end, ") of ", keys.count(),
                                                   " rows"));
  }
  if (request.effort < 0 || request.effort > kMaxEffort) {
    return absl::InvalidArgumentError(
        absl::StrCat("search: effort=", request.effort, ", must be 0 .. ", kMaxEffort));
  }
  return absl::OkStatus();
}

absl::Status ScoreIds(const SearchRequest& request, const Rows& keys, SearchScratch& scratch) {
  scratch.scores.resize(static_cast<size_t>(request.group) * scratch.ids.size());
  return ScoreRows(request, keys, scratch.ids.data(), static_cast<int64_t>(scratch.ids.size()),
                   scratch, scratch.scores.data());
}

absl::Status ScoreZone(const float* queries, int64_t vectors, float scale, const Rows& keys,
                       RowRange zone, ThreadPool* pool, float* scores) {
  const int64_t rows = zone.rows();
  const int64_t block = std::max<int64_t>(1, kScanBlockBytes / keys.row_bytes());
  keys.AskAhead(zone);
  return ForEachPart(pool, zone, block, [&](RowRange part) -> absl::Status {
    RETURN_IF_ERROR(keys.Verify(part));
    keys.ForEachPiece(part, [&](Position first, const void* address, int64_t count) {
      kernels::DotScore(queries, vectors, keys.head_dim(), address, count, scale,
                        scores + (first - zone.begin), rows);
    });
    return absl::OkStatus();
  });
}

absl::Status ScanZone(const SearchRequest& request, const Rows& keys, SearchScratch& scratch,
                      SearchResult& result) {
  const RowRange zone = request.zone;
  const int64_t rows = zone.rows();
  const float* scores = request.zone_scores;
  if (scores == nullptr) {
    scratch.scores.resize(static_cast<size_t>(request.group * rows));
    RETURN_IF_ERROR(ScoreZone(request.queries, request.group, request.scale, keys, zone,
                              request.pool, scratch.scores.data()));
    scores = scratch.scores.data();
  }
  result.zone_scored = true;
  result.zone_lse.resize(static_cast<size_t>(request.group));
  for (int64_t h = 0; h < request.group; ++h) {
    result.zone_lse[static_cast<size_t>(h)] = kernels::LogSumExp(scores + h * rows, rows);
  }
  result.visited = request.group * rows;
  SelectBest(
      request, scores, rows, result.zone_lse.data(), [zone](int64_t i) { return zone.begin + i; },
      scratch, result);
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
