#include "decoder/zone/candidate_rows.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "absl/container/flat_hash_set.h"
#include "common/status.h"
#include "kernels/of_heads.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"

namespace carrel::decoder {
namespace {

// Of a slot, beside its row: links, the row's number, its entry in the table, its bit.
constexpr int64_t kSlotOverheadBytes = 64;

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

absl::StatusOr<std::vector<int64_t>> RowCache::Slots(
    const RetrievalConfig& config, const AttentionShape& shape,
    const std::vector<select::Selection>& selections, int64_t zone_rows) {
  std::vector<int64_t> slots(selections.size(), 0);
  if (config.row_cache_bytes == 0) return slots;
  int64_t layers = 0, most = 1;
  for (const select::Selection& selection : selections) {
    if (select::IsAll(selection)) continue;
    ++layers;
    const double ahead = config.prefetch == Prefetch::kOff ? 1.0 : config.oversample;
    const int64_t rows = std::llround(ahead * static_cast<double>(select::TopKRows(selection)));
    most = std::max(most, std::min(rows, zone_rows));
  }
  if (layers == 0) return slots;
  const int64_t slot_bytes =
      layers * shape.kv_heads * (int64_t{shape.head_dim} * 2 * 2 + kSlotOverheadBytes);
  const int64_t each = std::min(zone_rows, config.row_cache_bytes / slot_bytes);
  if (each < most) {
    return absl::InvalidArgumentError(
        absl::StrCat("row_cache=", config.row_cache_bytes, " bytes hold ", each,
                     " rows per KV head and layer, a query brings ", most, ": at least ",
                     most * slot_bytes, " bytes are needed, or 0 for no cache"));
  }
  for (size_t l = 0; l < slots.size(); ++l) slots[l] = select::IsAll(selections[l]) ? 0 : each;
  return slots;
}

RowCache::RowCache(const AttentionShape& shape, const std::vector<int64_t>& slots)
    : shape_(shape), row_bytes_(int64_t{shape.head_dim} * 2), slots_(slots) {
  for (const int64_t count : slots_) {
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      heads_.push_back({.bank = kernels::RowBank(count),
                        .row_in = std::vector<int32_t>(static_cast<size_t>(count), -1),
                        .held = {},
                        .rows = std::vector<char>(static_cast<size_t>(count * 2 * row_bytes_))});
    }
  }
}

std::vector<std::vector<Position>> RowCache::Held(Layer layer) const {
  std::vector<std::vector<Position>> rows;
  if (!keeps(layer)) return rows;
  rows.resize(static_cast<size_t>(shape_.kv_heads));
  for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next()) {
    const std::vector<uint64_t>& held = heads_[Index(layer, head)].held;
    for (size_t word = 0; word < held.size(); ++word) {
      for (uint64_t left = held[word]; left != 0; left &= left - 1) {
        rows[static_cast<size_t>(head.value())].push_back(static_cast<Position>(64 * word) +
                                                          std::countr_zero(left));
      }
    }
  }
  return rows;
}

const char* RowCache::Find(Layer layer, KvHead head, Position id) const {
  const Head& cache = heads_[Index(layer, head)];
  const int32_t slot = cache.bank.Find(static_cast<int32_t>(id));
  return slot < 0 ? nullptr : cache.rows.data() + slot * 2 * row_bytes_;
}

void RowCache::Keep(Layer layer, KvHead head, absl::Span<const Position> ids,
                    absl::Span<const void* const> k, absl::Span<const void* const> v) {
  if (static_cast<int64_t>(ids.size()) > slots(layer)) return;
  Head& cache = heads_[Index(layer, head)];
  const char* const begin = cache.rows.data();
  std::vector<int32_t> named;
  std::vector<size_t> from;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto* bytes = static_cast<const char*>(k[i]);
    const bool was_here = bytes >= begin && bytes < begin + cache.rows.size();
    if (was_here && Find(layer, head, ids[i]) != bytes) continue;  // pushed out since
    named.push_back(static_cast<int32_t>(ids[i]));
    from.push_back(i);
  }
  const kernels::RowBankUse use = cache.bank.Use(named);
  for (const int32_t miss : use.misses) {
    const auto m = static_cast<size_t>(miss);
    const auto slot = static_cast<size_t>(use.slots[m]);
    const auto bit = [&](int32_t row) -> uint64_t& {
      const auto word = static_cast<size_t>(row / 64);
      if (word >= cache.held.size()) cache.held.resize(word + 1, 0);
      return cache.held[word];
    };
    if (cache.row_in[slot] >= 0)
      bit(cache.row_in[slot]) &= ~(uint64_t{1} << cache.row_in[slot] % 64);
    cache.row_in[slot] = named[m];
    bit(named[m]) |= uint64_t{1} << named[m] % 64;
    char* to = cache.rows.data() + slot * 2 * row_bytes_;
    std::memcpy(to, k[from[m]], static_cast<size_t>(row_bytes_));
    std::memcpy(to + row_bytes_, v[from[m]], static_cast<size_t>(row_bytes_));
  }
}

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
  const auto take = [&](absl::Span<const float> from, int64_t numbers, absl::string_view what,
                        const float*& data) {
    if (from.empty()) return absl::OkStatus();
    data = from.data();
    if (static_cast<int64_t>(from.size()) == numbers) return absl::OkStatus();
    return absl::DataLossError(absl::StrCat("reply: ", what, " of ", from.size(), " numbers"));
  };
  RETURN_IF_ERROR(take(piece.rest, shape_.group() * (1 + shape_.head_dim), "rest", to.rest));
  RETURN_IF_ERROR(take(piece.zone_lse, shape_.group(), "zone_lse", to.zone_lse));
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

absl::StatusOr<std::vector<float>> CandidateRows::ZoneLse() const {
  std::vector<float> lse;
  for (const Rows& rows : rows_) {
    if (rows.zone_lse == nullptr) return absl::DataLossError("reply: zone_lse of 0 numbers");
    lse.insert(lse.end(), rows.zone_lse, rows.zone_lse + shape_.group());
  }
  return lse;
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
