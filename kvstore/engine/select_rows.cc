#include "kvstore/engine/select_rows.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/status.h"
#include "kernels/dot_score/dot_score.h"
#include "kernels/group_score/group_score.h"
#include "kernels/topk/topk.h"

namespace carrel::kvstore {
namespace {

SearchScratch& ThreadScratch() {
  thread_local SearchScratch scratch;
  return scratch;
}

SearchRequest MakeSearch(const SelectParams& p, int64_t top_k) {
  SearchRequest request;
  request.queries = p.queries;
  request.group = p.context->shape().group();
  request.scale = p.context->scale();
  request.zone = p.zone;
  request.top_k = top_k;
  request.effort = static_cast<int32_t>(p.effort);
  return request;
}

}  // namespace

absl::Status SelectTopK(const SelectParams& p, Selected& selected) {
  selected = Selected();
  if (p.zone.rows() == 0) {
    selected.zone_lse.assign(p.context->shape().group(), -INFINITY);
    selected.zone_scored = true;
    return absl::OkStatus();
  }
  SearchResult result;
  const SearchRequest request = MakeSearch(p, std::min(p.top_k, p.zone.rows()));
  const auto search = [&](const Index& index) {
    return index.Search(request, ThreadScratch(), result);
  };
  // Who asks for the whole zone gets it, also where a graph would miss rows.
  RETURN_IF_ERROR(p.top_k >= p.zone.rows()
                      ? search(*p.rows->exact)
                      : p.context->WithIndex(p.layer, p.kv_head, *p.rows, search));
  selected.visited = result.visited;
  selected.candidates =
      result.zone_scored ? p.zone.rows() : static_cast<int64_t>(result.ids.size());
  selected.ids = std::move(result.ids);
  selected.scores = std::move(result.scores);
  selected.zone_lse = std::move(result.zone_lse);
  selected.zone_scored = result.zone_scored;
  return absl::OkStatus();
}

absl::Status SelectAmong(const SelectParams& p, absl::Span<const Position> candidates,
                         Selected& selected) {
  selected = Selected();
  const int64_t n = static_cast<int64_t>(candidates.size());
  selected.candidates = n;
  if (n == 0) return absl::OkStatus();
  const int64_t group = p.context->shape().group();
  SearchScratch& scratch = ThreadScratch();
  scratch.pointers.resize(n);
  for (int64_t j = 0; j < n; ++j) {
    RETURN_IF_ERROR(p.rows->keys.VerifyRow(candidates[j]));
    scratch.pointers[j] = p.rows->keys.Address(candidates[j]);
  }
  scratch.scores.resize(static_cast<size_t>(group * n));
  scratch.group_scores.resize(n);
  thread_local std::vector<float> base;
  base.resize(group);
  kernels::DotScoreRows(p.queries, group, p.context->shape().head_dim, scratch.pointers.data(), n,
                        p.context->scale(), scratch.scores.data(), n);
  for (int64_t h = 0; h < group; ++h) {
    base[h] = kernels::LogSumExp(&scratch.scores[h * n], n);
  }
  kernels::GroupScore(scratch.scores.data(), group, n, n, base.data(), scratch.group_scores.data());
  scratch.ids.resize(std::min(p.top_k, n));
  const int64_t kept = kernels::TopK(scratch.group_scores.data(), n, p.top_k < n ? p.top_k : n,
                                     scratch.ids.data(), scratch.topk);
  selected.ids.resize(kept);
  selected.scores.resize(static_cast<size_t>(group * kept));
  for (int64_t j = 0; j < kept; ++j) {
    const int64_t from = scratch.ids[j];
    selected.ids[j] = candidates[from];
    for (int64_t h = 0; h < group; ++h) {
      selected.scores[h * kept + j] = scratch.scores[h * n + from];
    }
  }
  return absl::OkStatus();
}

absl::Status ZoneLse(const SelectParams& p, std::vector<float>& zone_lse) {
  zone_lse.assign(p.context->shape().group(), -INFINITY);
  if (p.zone.rows() == 0) return absl::OkStatus();
  SearchResult result;
  RETURN_IF_ERROR(p.rows->exact->Search(MakeSearch(p, 1), ThreadScratch(), result));
  CARREL_CHECK(result.zone_lse.size() == zone_lse.size());
  zone_lse = std::move(result.zone_lse);
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
