#include "decoder/zone/candidate_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

#include "absl/container/flat_hash_set.h"
#include "common/status.h"
#include "kernels/of_heads.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"

namespace carrel::decoder {

namespace {

// ln(exp(found) + exp(what Piece::rest says of q head h for its query)).
float WithRest(float found, const float* rest, int64_t h, int64_t head_dim, const float* query) {
  if (rest == nullptr) return found;
  const float* const line = rest + h * (head_dim + 1);  // at zero, slope
  const float lse = std::inner_product(line + 1, line + 1 + head_dim, query, line[0]);
  if (!std::isfinite(lse)) return found;  // there are no other rows
  const float more = std::max(found, lse), less = std::min(found, lse);
  return more + std::log1p(std::exp(less - more));
}

}  // namespace

CandidateRows::CandidateRows(const AttentionShape& shape, RowRange zone, int64_t tokens)
    : shape_(shape),
      zone_(zone),
      tokens_(tokens),
      rows_(static_cast<size_t>(tokens) * shape.kv_heads) {}

absl::StatusOr<CandidateRows> CandidateRows::Of(std::vector<retrieval::Part> parts,
                                                const AttentionShape& shape, RowRange zone,
                                                int64_t tokens, const RowCache* held, Layer layer) {
  CandidateRows rows(shape, zone, tokens);
  rows.parts_ = std::move(parts);
  for (const retrieval::Part& part : rows.parts_) {
    for (const retrieval::Piece& piece : part.pieces) RETURN_IF_ERROR(rows.Add(piece, held, layer));
  }
  RETURN_IF_ERROR(rows.CheckComplete());
  return rows;
}

absl::Status CandidateRows::Add(const retrieval::Piece& piece, const RowCache* held, Layer layer) {
  RETURN_IF_ERROR(CheckPiece(piece, tokens_, shape_));
  for (const Position id : piece.ids) {
    if (id >= zone_.begin && id < zone_.end) continue;
    return absl::DataLossError(absl::StrCat("reply: row ", id, " is outside the zone [",
                                            zone_.begin, ", ", zone_.end, ")"));
  }
  Rows& to = rows_[static_cast<size_t>(piece.token * shape_.kv_heads + piece.kv_head.value())];
  to.ids.insert(to.ids.end(), piece.ids.begin(), piece.ids.end());
  if (!piece.rest.empty()) {
    if (static_cast<int64_t>(piece.rest.size()) != shape_.group() * (1 + shape_.head_dim))
      return absl::DataLossError(absl::StrCat("reply: rest of ", piece.rest.size(), " numbers"));
    to.rest = piece.rest.data();
  }
  return held == nullptr ? absl::OkStatus() : AddRows(piece, *held, layer, to);
}

absl::Status CandidateRows::AddRows(const retrieval::Piece& piece, const RowCache& held,
                                    Layer layer, Rows& to) const {
  const size_t rows = piece.ids.size();
  std::vector<const char*> here(rows, nullptr);
  size_t missing = rows;
  for (size_t j = 0; j < rows; ++j) {
    here[j] = held.Find(layer, piece.kv_head, piece.ids[j]);
    missing -= here[j] != nullptr;
  }
  // A store that knows nothing of held rows sends all.
  const bool all = piece.k.size() == rows;
  const size_t sent = all ? rows : missing;
  if (piece.k.size() != sent || piece.v.size() != sent) {
    return absl::DataLossError(absl::StrCat("reply: ", piece.k.size(), " K rows and ",
                                            piece.v.size(), " V rows, expected ", sent));
  }
  if (!all) to.held += static_cast<int64_t>(rows - missing);
  for (size_t j = 0, next = 0; j < rows; ++j) {
    const bool travelled = all || here[j] == nullptr;
    to.k.push_back(travelled ? piece.k[next] : here[j]);
    to.v.push_back(travelled ? piece.v[next] : here[j] + int64_t{shape_.head_dim} * 2);
    next += travelled;
  }
  return absl::OkStatus();
}

absl::Status CandidateRows::CheckComplete() const {
  std::vector<Position> sorted;
  for (size_t i = 0; i < rows_.size(); ++i) {
    sorted = rows_[i].ids;
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (!sorted.empty() && twice == sorted.end()) continue;
    return absl::DataLossError(
        absl::StrCat("reply: ", sorted.empty() ? "no rows" : absl::StrCat("row ", *twice, " twice"),
                     " for token ", i / shape_.kv_heads, " kv_head ", i % shape_.kv_heads));
  }
  return absl::OkStatus();
}

void CandidateRows::KeepIn(RowCache& cache, Layer layer, BankStatistics& statistics) const {
  statistics.slots = cache.slots(layer);
  for (size_t i = 0; i < rows_.size(); ++i) {
    const KvHead head(static_cast<int32_t>(i % static_cast<size_t>(shape_.kv_heads)));
    statistics.wanted += static_cast<int64_t>(rows_[i].ids.size());
    statistics.hits += rows_[i].held;
    cache.Keep(layer, head, rows_[i].ids, rows_[i].k, rows_[i].v);
  }
}

int64_t CandidateRows::Attend(const float* q, absl::FunctionRef<int64_t(KvHead)> top_k_of,
                              ThreadPool* pool, Partial& partial) const {
  const int64_t d = shape_.head_dim, group = shape_.group();
  const float scale = kernels::ScaleOf(shape_);
  std::atomic<int64_t> attended{0};
  pool->ParallelFor(tokens_ * shape_.kv_heads, [&](int64_t unit) {
    thread_local std::vector<float> scores, group_scores, base;
    thread_local std::vector<const void*> k, v;
    thread_local std::vector<int64_t> best;
    thread_local std::vector<uint64_t> scratch;
    const int64_t token = unit / shape_.kv_heads;
    const KvHead head(static_cast<int32_t>(unit % shape_.kv_heads));
    const int64_t top_k = top_k_of(head);
    const Rows& rows = rows_[static_cast<size_t>(unit)];
    const int64_t n = static_cast<int64_t>(rows.ids.size());
    attended += std::min(n, top_k);
    if (top_k >= n) return partial.Attend(shape_, token, head, q, rows.k, rows.v);
    const float* queries = q + (token * shape_.q_heads + head.value() * group) * d;
    scores.resize(static_cast<size_t>(group * n));
    kernels::DotScoreRows(queries, group, d, rows.k.data(), n, scale, scores.data(), n);
    base.resize(group);
    for (int64_t h = 0; h < group; ++h) {
      base[h] = WithRest(kernels::LogSumExp(&scores[h * n], n), rows.rest, h, d, queries + h * d);
    }
    group_scores.resize(n);
    kernels::GroupScore(scores.data(), group, n, n, base.data(), group_scores.data());
    best.resize(top_k);
    k.clear();
    v.clear();
    kernels::TopK(group_scores.data(), n, top_k, best.data(), scratch);
    for (const int64_t j : best) {
      k.push_back(rows.k[j]);
      v.push_back(rows.v[j]);
    }
    partial.Attend(shape_, token, head, q, k, v);
  });
  return attended;
}

absl::Status CheckPiece(const retrieval::Piece& piece, int64_t tokens,
                        const AttentionShape& shape) {
  if (piece.token < tokens && piece.kv_head.value() < shape.kv_heads) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("reply: token ", piece.token, " kv_head ",
                                          piece.kv_head.value(), " was not asked for (", tokens,
                                          " tokens, ", shape.kv_heads, " heads)"));
}

double ShareFound(const std::vector<Position>& wanted, const std::vector<Position>& found) {
  if (wanted.empty()) return 1;
  const absl::flat_hash_set<Position> set(found.begin(), found.end());
  int64_t hits = 0;
  for (Position id : wanted) hits += set.contains(id);
  return static_cast<double>(hits) / static_cast<double>(wanted.size());
}

}  // namespace carrel::decoder
