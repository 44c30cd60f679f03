#include "kvstore/engine/select_rows.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/status.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"
#include "kvstore/index/int8_scan.h"
#include "kvstore/index/search_util.h"

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
  request.zone_scores = p.zone_scores;
  request.int8_scores = p.int8_scores.scores == nullptr ? nullptr : &p.int8_scores;
  request.exact_lse = p.exact_lse;
  request.by_id = p.by_id && !WantsExactLse(*p.selection);
  request.pool = p.pool;
  return request;
}

// Rows of the first search by range or mass; each further one asks for kMoreRows times as many.
constexpr int64_t kFirstRows = 256;
constexpr int64_t kMoreRows = 4;

absl::Status Search(const SelectParams& p, int64_t top_k, SearchResult& result) {
  const SearchRequest request = MakeSearch(p, top_k);
  const auto search = [&](const Index& index) {
    return index.Search(request, ThreadScratch(), result);
  };
  // Who asks for the whole zone gets it, also where a graph would miss rows.
  if (top_k >= p.zone.rows()) return search(*p.rows->exact);
  if (p.scan) return p.context->WithScan(p.layer, p.kv_head, *p.rows, search);
  return p.context->WithIndex(p.layer, p.kv_head, *p.rows, search);
}

// Which of the rows found qualify, and whether rows that were not found might.
struct Qualified {
  std::vector<int64_t> rows;  // indices into what was found, ascending
  bool complete = false;
};

Qualified QualifyByRange(const SelectParams& p, float below, const SearchResult& found) {
  const auto rows = static_cast<int64_t>(found.ids.size());
  const int64_t group = p.context->shape().group();
  Qualified qualified;
  qualified.complete = true;
  // Rows that were not found have no larger group score than the least that was.
  const float last = found.ids.empty() ? -INFINITY : found.least;
  std::vector<char> in(static_cast<size_t>(rows), 0);
  for (int64_t h = 0; h < group; ++h) {
    const float* scores = found.scores.data() + h * rows;
    const float least = *std::max_element(scores, scores + rows) - below;
    for (int64_t j = 0; j < rows; ++j) in[static_cast<size_t>(j)] |= scores[j] >= least;
    if (last > least - found.zone_lse[static_cast<size_t>(h)]) qualified.complete = false;
  }
  for (int64_t j = 0; j < rows; ++j) {
    if (in[static_cast<size_t>(j)]) qualified.rows.push_back(j);
  }
  return qualified;
}

Qualified QualifyByMass(const SelectParams& p, float share, const SearchResult& found) {
  const auto rows = static_cast<int64_t>(found.ids.size());
  Qualified qualified;
  int64_t needed = 0;
  qualified.complete = true;
  for (int64_t h = 0; h < p.context->shape().group(); ++h) {
    const float lse = found.zone_lse[static_cast<size_t>(h)];
    double mass = 0;
    int64_t j = 0;
    while (j < rows && mass < share) {
      mass += std::exp(double{found.scores[static_cast<size_t>(h * rows + j++)]} - lse);
    }
    // What rounding leaves to the whole is no reason to read on.
    if (mass < share - 1e-6) qualified.complete = false;
    needed = std::max(needed, j);
  }
  for (int64_t j = 0; j < needed; ++j) qualified.rows.push_back(j);
  return qualified;
}

// No row is left whose group score is above `last`, that of one of `rows` rows.
void BoundBy(float last, int64_t rows, const std::vector<float>& base, std::vector<float>& bound) {
  bound.clear();
  bound.reserve(base.size());
  for (const float of_head : base) {
    if (rows > 0) bound.push_back(last + of_head);
  }
}

// Likewise, of rows with scores [group, rows], best first.
void BoundByLast(const std::vector<float>& scores, int64_t rows, const std::vector<float>& base,
                 std::vector<float>& bound) {
  float last = -INFINITY;
  for (size_t h = 0; rows > 0 && h < base.size(); ++h) {
    last = std::max(last, scores[(h + 1) * static_cast<size_t>(rows) - 1] - base[h]);
  }
  BoundBy(last, rows, base, bound);
}

// Rows within range of the best were kept of those found: others that were found score lower.
void BoundByRange(float below, const SearchResult& found, std::vector<float>& bound) {
  const auto rows = static_cast<int64_t>(found.ids.size());
  for (size_t h = 0; h < bound.size(); ++h) {
    const float* scores = found.scores.data() + static_cast<int64_t>(h) * rows;
    bound[h] = std::max(bound[h], *std::max_element(scores, scores + rows) - below);
  }
}

void Keep(const SearchResult& found, int64_t group, const std::vector<int64_t>& kept,
          Selected& selected) {
  const auto rows = static_cast<int64_t>(found.ids.size());
  selected.ids.reserve(kept.size());
  selected.scores.reserve(static_cast<size_t>(group) * kept.size());
  for (const int64_t j : kept) selected.ids.push_back(found.ids[static_cast<size_t>(j)]);
  for (int64_t h = 0; h < group; ++h) {
    for (const int64_t j : kept) {
      selected.scores.push_back(found.scores[static_cast<size_t>(h * rows + j)]);
    }
  }
}

}  // namespace

void Selected::Clear() {
  for (std::vector<float>* values : {&scores, &zone_lse, &bound}) values->clear();
  ids.clear();
  zone_scored = false;
  candidates = visited = 0;
}

bool WantsExactLse(const select::Selection& selection) {
  return std::holds_alternative<select::Mass>(selection);
}

bool ScansInInt8(const select::Selection& selection, KvHead kv_head, int64_t zone_rows) {
  if (select::IsAll(selection) || WantsExactLse(selection)) return false;
  const auto* const top_k = std::get_if<select::TopK>(&selection);
  const int64_t wanted = top_k != nullptr
                             ? std::min(top_k->Of(kv_head), zone_rows)
                             : std::min(select::MostRows(selection, zone_rows), kFirstRows);
  return Int8ScanPays(zone_rows, wanted);
}

absl::Status SelectRows(const SelectParams& p, Selected& selected) {
  selected.Clear();
  const int64_t group = p.context->shape().group(), zone = p.zone.rows();
  if (zone == 0) {
    selected.zone_lse.assign(group, -INFINITY);
    selected.zone_scored = true;
    return absl::OkStatus();
  }
  thread_local SearchResult result;
  if (const auto* top_k = std::get_if<select::TopK>(p.selection)) {
    RETURN_IF_ERROR(Search(p, std::min(top_k->Of(p.kv_head), zone), result));
    BoundBy(result.least, static_cast<int64_t>(result.ids.size()), result.zone_lse, selected.bound);
    selected.ids.swap(result.ids);
    selected.scores.swap(result.scores);
  } else {
    const auto* const range = std::get_if<select::Range>(p.selection);
    const int64_t most = select::MostRows(*p.selection, zone);
    for (int64_t top_k = std::min(most, kFirstRows);; top_k = std::min(most, top_k * kMoreRows)) {
      RETURN_IF_ERROR(Search(p, top_k, result));
      selected.visited += result.visited;
      const Qualified qualified =
          range != nullptr ? QualifyByRange(p, range->below, result)
                           : QualifyByMass(p, std::get<select::Mass>(*p.selection).share, result);
      if (!qualified.complete && top_k < most) continue;
      Keep(result, group, qualified.rows, selected);
      if (range == nullptr) {
        BoundByLast(selected.scores, static_cast<int64_t>(selected.ids.size()), result.zone_lse,
                    selected.bound);
      } else {
        BoundBy(result.least, static_cast<int64_t>(result.ids.size()), result.zone_lse,
                selected.bound);
        BoundByRange(range->below, result, selected.bound);
      }
      break;
    }
    selected.visited -= result.visited;
  }
  selected.visited += result.visited;
  const bool all = result.zone_scored || p.scan || p.context->ScansAll(p.layer, p.kv_head);
  selected.candidates = all ? zone : static_cast<int64_t>(selected.ids.size());
  selected.zone_lse.swap(result.zone_lse);
  selected.zone_scored = result.zone_scored;
  return absl::OkStatus();
}

absl::StatusOr<ZoneRest> RestOf(const SelectParams& p, const Selected& selected) {
  const auto n = static_cast<int64_t>(selected.ids.size());
  std::vector<float> lse;
  for (int64_t h = 0; h < p.context->shape().group(); ++h) {
    lse.push_back(kernels::LogSumExp(selected.scores.data() + h * n, n));
  }
  std::vector<Position> given = selected.ids;
  std::sort(given.begin(), given.end());
  ZoneRestParams rest;
  rest.keys = &p.rows->keys;
  rest.zone = p.zone;
  rest.given = given;
  rest.queries = p.queries;
  rest.group = p.context->shape().group();
  rest.scale = p.context->scale();
  rest.zone_lse = selected.zone_lse.data();
  rest.given_lse = lse.data();
  return ZoneRest::Make(rest);
}

absl::StatusOr<CandidateIds> KeepCandidates(const SelectParams& p, Selected& selected) {
  CandidateIds candidates;
  ASSIGN_OR_RETURN(candidates.rest, RestOf(p, selected));
  candidates.ids = std::move(selected.ids);
  std::sort(candidates.ids.begin(), candidates.ids.end());
  return candidates;
}

absl::Status SelectAmong(const SelectParams& p, const CandidateIds& among, Selected& selected) {
  selected.Clear();
  const std::vector<Position>& candidates = among.ids;
  const int64_t n = static_cast<int64_t>(candidates.size());
  selected.candidates = n;
  if (n == 0) return absl::OkStatus();
  const int64_t group = p.context->shape().group();
  SearchScratch& scratch = ThreadScratch();
  scratch.scores.resize(static_cast<size_t>(group * n));
  RETURN_IF_ERROR(ScoreRows(MakeSearch(p, n), p.rows->keys, candidates.data(), n, scratch,
                            scratch.scores.data()));
  scratch.group_scores.resize(n);
  thread_local std::vector<float> base;
  base.resize(group);
  for (int64_t h = 0; h < group; ++h) {
    const float found = kernels::LogSumExp(&scratch.scores[h * n], n);
    const float rest = among.rest.Lse(h, p.queries + h * p.context->shape().head_dim);
    const float more = std::max(found, rest), less = std::min(found, rest);
    base[h] = more + std::log1p(std::exp(less - more));
  }
  kernels::GroupScore(scratch.scores.data(), group, n, n, base.data(), scratch.group_scores.data());
  const int64_t wanted = std::min(std::get<select::TopK>(*p.selection).Of(p.kv_head), n);
  scratch.ids.resize(wanted);
  const int64_t kept =
      kernels::TopK(scratch.group_scores.data(), n, wanted, scratch.ids.data(), scratch.topk);
  selected.ids.resize(kept);
  selected.scores.resize(static_cast<size_t>(group * kept));
  for (int64_t j = 0; j < kept; ++j) {
    const int64_t from = scratch.ids[j];
    selected.ids[j] = candidates[from];
    for (int64_t h = 0; h < group; ++h) {
      selected.scores[h * kept + j] = scratch.scores[h * n + from];
    }
  }
  BoundByLast(selected.scores, kept, base, selected.bound);
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
