#include "kvstore/engine/query_reply.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/sparse_attention/sparse_spans.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kvstore/engine/attend_all.h"
#include "kvstore/index/int8_scan.h"
#include "kvstore/index/search_util.h"
#include "kvstore/index/summaries/summaries.h"

namespace carrel::kvstore {
namespace {

// What the wire adds per token and head: tags, shapes, numbers.
constexpr int64_t kPieceOverheadBytes = 96;
// A head's rows are not continued in a part that has room for fewer.
constexpr int64_t kLeastRows = 16;
// Scores of several tokens that one scan of a head's keys gives: so many, where that is some tokens, that
// they are still in a core's cache when they are looked at; never more than kMostScores. The scan of
// 17 queries takes as long as that of 32.
constexpr int64_t kNearScores = int64_t{256} << 10;
constexpr int64_t kMostScores = int64_t{4} << 20;
constexpr int64_t kQueriesAtOnce = 16;
constexpr int64_t kLeastTogether = 4;
// Tokens and KV heads that keep a thread busy enough until the last ones.
constexpr int64_t kUnitsPerThread = 4;

}  // namespace

int64_t QueryReply::ResultBytes(const QueryRequest& r, const OpenContext& context, RowRange zone) {
  const AttentionShape& shape = context.shape();
  const int64_t kv_units = r.tokens * shape.kv_heads;
  // A Unit's zone_lse has a float per q head.
  int64_t bytes = kv_units * static_cast<int64_t>(sizeof(Unit)) + 4 * r.tokens * shape.q_heads;
  if (r.speculative) {
    bytes += kv_units * ZoneRest::Bytes(shape.group(), shape.head_dim);
  }
  if (r.want == Want::kAttend) {
    const bool all = select::Covers(r.selection, zone.rows());
    const int64_t states = all ? std::max<int64_t>(1, AttendMostCut(zone, r.tokens)) : 1;
    bytes += 4 * states * r.tokens * shape.q_heads * (shape.head_dim + 1);
  } else if (!select::IsAll(r.selection)) {
    const int64_t scores = r.want == Want::kRows ? 0 : 4 * shape.group();
    bytes += kv_units * select::MostRows(r.selection, zone.rows()) * (8 + scores);
  }
  return bytes;
}

QueryReply::QueryReply(QueryRequest request, Session::Slot slot,
                       std::shared_ptr<CandidateSet> among, std::shared_ptr<CandidateSet> found)
    : request_(std::move(request)),
      slot_(std::move(slot)),
      among_(std::move(among)),
      found_(std::move(found)),
      zone_(slot_.session().zone()) {}

bool QueryReply::attends_all() const {
  return request_.want == Want::kAttend && among_ == nullptr &&
         select::Covers(request_.selection, zone_.rows());
}

const float* QueryReply::QueriesOf(int64_t token, int32_t kv_head) const {
  const AttentionShape& shape = context().shape();
  return request_.queries.data() +
         (token * shape.q_heads + kv_head * shape.group()) * shape.head_dim;
}

SelectParams QueryReply::ParamsOf(int64_t token, int32_t kv_head, ThreadPool& pool,
                                  const ScoredHead* scored) const {
  SelectParams params;
  params.context = &context();
  params.rows = heads_[kv_head].get();
  params.layer = request_.layer;
  params.kv_head = KvHead(kv_head);
  params.zone = zone_;
  params.queries = QueriesOf(token, kv_head);
  params.selection = &request_.selection;
  params.effort = request_.effort;
  params.scan = request_.scan;
  params.exact_lse = wants_exact_lse();
  params.by_id = request_.want == Want::kAttend;  // sums alone
  if (scored != nullptr) scored->Give(token, context().shape().group(), params);
  if (SharesUnits(pool)) params.pool = &pool;
  return params;
}

// Where each thread has units of its own, they need not share them.
bool QueryReply::SharesUnits(const ThreadPool& pool) const {
  return static_cast<int64_t>(units_.size()) < kUnitsPerThread * (pool.threads() + 1);
}

absl::Status QueryReply::CheckWanted() const {
  if (slot_.session().cancelled()) return absl::CancelledError("query: cancelled");
  return Annotate(CheckDeadline(request_.deadline), "query");
}

absl::Status QueryReply::Run(ThreadPool& pool, absl::Duration waited) {
  RETURN_IF_ERROR(CheckWanted());
  if (among_ != nullptr && !among_->status().ok()) {
    return Annotate(
        among_->status(),
        absl::StrCat("query: among_candidates_of=", request_.among_candidates_of, " failed"));
  }
  const absl::Time start = absl::Now();
  seen_ = context().LastLook(request_.layer);
  for (int attempt = 0; attempt < OpenContext::kMostAttempts; ++attempt) {
    absl::Status status = RunOnce(pool);
    ASSIGN_OR_RETURN(const int64_t after, context().Look(request_.layer));
    if (after == seen_) {
      statistics_.queue_us = absl::ToInt64Microseconds(waited);
      statistics_.search_us = absl::ToInt64Microseconds(absl::Now() - start);
      return status;
    }
    seen_ = after;
  }
  return context().ChangesTooOften();
}

absl::Status QueryReply::OpenHeads() {
  heads_.clear();
  heads_.reserve(static_cast<size_t>(context().shape().kv_heads));
  for (int32_t h = 0; h < context().shape().kv_heads; ++h) {
    ASSIGN_OR_RETURN(heads_.emplace_back(), context().Head(request_.layer, KvHead(h)));
  }
  return absl::OkStatus();
}

absl::Status QueryReply::RunOnce(ThreadPool& pool) {
  const AttentionShape& shape = context().shape();
  RETURN_IF_ERROR(OpenHeads());
  units_.clear();
  units_.resize(static_cast<size_t>(request_.tokens * shape.kv_heads));
  if (request_.want == Want::kAttend) {
    const int64_t heads = request_.tokens * shape.q_heads;
    if (request_.out == nullptr) own_.resize(static_cast<size_t>(heads * (shape.head_dim + 1)));
    out_ = request_.out != nullptr ? request_.out : own_.data();
    lse_ = request_.out != nullptr ? request_.lse : out_ + heads * shape.head_dim;
  }
  if (select::IsAll(request_.selection)) {
    for (Unit& unit : units_) unit.rows = request_.want == Want::kAttend ? 0 : zone_.rows();
  }
  if (attends_all()) {
    RETURN_IF_ERROR(RunAttendAll(pool));
  } else if (!select::IsAll(request_.selection)) {
    RETURN_IF_ERROR(RunSelect(pool));
  } else if (request_.measure_mass) {
    RETURN_IF_ERROR(ForEachUnit(pool, [&](int64_t token, int32_t h) {
      return ZoneLse(ParamsOf(token, h, pool, nullptr),
                     units_[token * shape.kv_heads + h].zone_lse);
    }));
  }
  if (select::IsAll(request_.selection) || attends_all()) {
    statistics_.candidates = request_.tokens * shape.kv_heads * zone_.rows();
    statistics_.rows = statistics_.candidates;
  }
  return absl::OkStatus();
}

absl::Status QueryReply::ForEach(ThreadPool& pool, int64_t count,
                                 absl::FunctionRef<absl::Status(int64_t)> body) {
  absl::Mutex mu;
  absl::Status first_error;
  std::atomic<bool> failed{false};
  pool.ParallelFor(count, [&](int64_t i) {
    if (failed.load(std::memory_order_relaxed)) return;
    absl::Status status = CheckWanted();
    if (status.ok()) status = CatchThrown("query", [&] { return body(i); });
    if (status.ok()) return;
    absl::MutexLock lock(&mu);
    if (first_error.ok()) first_error = status;
    failed = true;
  });
  return first_error;
}

// Head-major: an index that had to be loaded serves all tokens before the next one is.
absl::Status QueryReply::ForEachUnit(ThreadPool& pool,
                                     absl::FunctionRef<absl::Status(int64_t, int32_t)> body) {
  const int64_t tokens = request_.tokens, units = tokens * context().shape().kv_heads;
  // Where threads have nothing else to do, one of them looks after the budget meanwhile, and at the
  // files: the look after the last read, which all wait for, then finds the kernel's memory in a cache.
  const int64_t beside = SharesUnits(pool) ? 1 : 0;
  return ForEach(pool, units + beside, [&](int64_t i) -> absl::Status {
    if (i == units) {
      context().EnforceBudget();
      return context().Look(request_.layer).status();
    }
    if (beside > 0) {
      context().TouchAlone(request_.layer);
    } else {
      context().Touch(request_.layer);
    }
    return body(i % tokens, static_cast<int32_t>(i / tokens));
  });
}

int64_t QueryReply::TokensScoredTogether() const {
  const AttentionShape& shape = context().shape();
  if (among_ != nullptr || zone_.rows() == 0) return 1;
  for (KvHead head(0); head.value() < shape.kv_heads; head = head.next()) {
    if (!request_.scan && !context().ScansAll(request_.layer, head)) return 1;
  }
  const int64_t scores = shape.group() * zone_.rows();
  const int64_t queries = kNearScores / zone_.rows() / kQueriesAtOnce * kQueriesAtOnce;
  const int64_t together = std::max(kLeastTogether, queries / shape.group());
  return std::clamp<int64_t>(std::min(together, kMostScores / scores), 1, request_.tokens);
}

void QueryReply::ScoredHead::Give(int64_t token, int64_t group, SelectParams& params) const {
  const float* const of_token = scores + (token - first) * group * stride;
  if (int8.has_value()) {
    params.int8_scores = {of_token + offset, stride, &lse[(token - first) * group], *int8};
  } else {
    params.zone_scores = of_token;
  }
}

absl::Status QueryReply::ScoreHead(ThreadPool& pool, int64_t first, int64_t tokens, KvHead kv_head,
                                   ScoredHead& scored) {
  thread_local std::vector<float> queries, near;
  const AttentionShape& shape = context().shape();
  const int64_t vectors = tokens * shape.group();
  const MappedHead& head = *heads_[static_cast<size_t>(kv_head.value())];
  queries.clear();
  for (int64_t token = first; token < first + tokens; ++token) {
    const float* q = QueriesOf(token, kv_head.value());
    queries.insert(queries.end(), q, q + shape.group() * shape.head_dim);
  }
  const bool int8 = !wants_exact_lse() && ScansInInt8(request_.selection, kv_head, zone_.rows());
  scored.first = first;
  scored.stride = int8 ? Int8Scan::Stride(zone_) : zone_.rows();
  const auto floats = static_cast<size_t>(vectors * scored.stride);
  if (floats <= 2 * kNearScores) {  // what a thread keeps is little
    near.resize(std::max(near.size(), floats));
    scored.scores = near.data();
  } else {
    scored.own = std::make_unique_for_overwrite<float[]>(floats);
    scored.scores = scored.own.get();
  }
  if (!int8) {
    return ScoreZone(queries.data(), vectors, context().scale(), head.keys, zone_, &pool,
                     scored.scores);
  }
  scored.offset = Int8Scan::Offset(zone_);
  scored.lse.resize(static_cast<size_t>(vectors));
  return context().WithScan(request_.layer, kv_head, head, [&](const Int8Scan& scan) {
    return scan.Score(queries.data(), vectors, context().scale(), zone_, &pool, scored.scores,
                      scored.lse.data(), scored.int8.emplace());
  });
}

absl::Status QueryReply::RunSelect(ThreadPool& pool) {
  std::atomic<int64_t> candidates{0}, visited{0}, rows{0};
  const auto run = [&](int64_t token, int32_t kv_head, const ScoredHead* scored) -> absl::Status {
    thread_local Selected selected;
    int64_t found = 0;
    RETURN_IF_ERROR(RunUnit(pool, token, kv_head, scored, selected, found));
    candidates += selected.candidates;
    rows += found;
    visited += selected.visited;
    return absl::OkStatus();
  };
  const int64_t together = TokensScoredTogether(), tokens = request_.tokens;
  if (together == 1) {
    RETURN_IF_ERROR(ForEachUnit(
        pool, [&](int64_t token, int32_t kv_head) { return run(token, kv_head, nullptr); }));
  } else {
    // A head's scores are looked at by who made them, before the next head's are made.
    const int64_t parts = (tokens + together - 1) / together;
    RETURN_IF_ERROR(ForEach(pool, parts * context().shape().kv_heads, [&](int64_t i) {
      const KvHead head(static_cast<int32_t>(i / parts));
      const int64_t first = i % parts * together, count = std::min(together, tokens - first);
      context().Touch(request_.layer);  // once for these tokens: it asks the kernel
      ScoredHead scored;
      RETURN_IF_ERROR(ScoreHead(pool, first, count, head, scored));
      return ForEach(pool, count, [&](int64_t j) { return run(first + j, head.value(), &scored); });
    }));
  }
  statistics_.candidates = candidates;
  statistics_.visited = visited;
  statistics_.rows = rows;
  return absl::OkStatus();
}

absl::Status QueryReply::RunUnit(ThreadPool& pool, int64_t token, int32_t kv_head,
                                 const ScoredHead* scored, Selected& selected, int64_t& rows) {
  const size_t i = static_cast<size_t>(token) * context().shape().kv_heads + kv_head;
  const SelectParams params = ParamsOf(token, kv_head, pool, scored);
  RETURN_IF_ERROR(among_ != nullptr ? SelectAmong(params, among_->of(i), selected)
                                    : SelectRows(params, selected));
  rows = static_cast<int64_t>(selected.ids.size());
  Unit& unit = units_[i];
  if (request_.measure_mass) {
    if (!selected.zone_scored) RETURN_IF_ERROR(ZoneLse(params, selected.zone_lse));
    unit.zone_lse = selected.zone_lse;
  }
  if (request_.want == Want::kAttend) return AttendSelected(token, kv_head, params.pool, selected);
  if (found_ != nullptr) {
    ASSIGN_OR_RETURN(unit.candidates, KeepCandidates(params, selected));
    return absl::OkStatus();
  }
  if (sends_rest()) {
    ASSIGN_OR_RETURN(unit.candidates.rest, RestOf(params, selected));
  }
  unit.rows = static_cast<int64_t>(selected.ids.size());
  unit.ids = std::move(selected.ids);
  if (wants_scores()) unit.scores = std::move(selected.scores);
  return absl::OkStatus();
}

// Who is free estimates the rest while others attend to spans of rows.
absl::Status QueryReply::AttendSelected(int64_t token, int32_t kv_head, ThreadPool* pool,
                                        Selected& selected) {
  const AttentionShape& shape = context().shape();
  const Rows& values = heads_[kv_head]->values;
  thread_local std::vector<const void*> v;
  thread_local std::vector<float> states;
  const int64_t q_head = token * shape.q_heads + kv_head * shape.group();
  kernels::SparseAttentionParams attention;
  attention.group = shape.group();
  attention.rows = static_cast<int64_t>(selected.ids.size());
  attention.head_dim = shape.head_dim;
  attention.scale = context().scale();
  attention.scores = selected.scores.data();
  attention.out = &out_[q_head * shape.head_dim];
  attention.lse = &lse_[q_head];
  v.resize(selected.ids.size());
  attention.v = v.data();
  const int64_t spans = kernels::SparseSpans(attention.rows);
  const int64_t rest = shape.group() * (shape.head_dim + 1);  // the estimate's state
  states.resize(static_cast<size_t>(rest + kernels::SparseSpanFloats(attention)));
  float* const estimated = states.data();
  const auto attend = [&, v_rows = v.data()](int64_t span) -> absl::Status {
    const int64_t begin = kernels::SparseSpanBegin(attention.rows, span);
    const int64_t end = kernels::SparseSpanBegin(attention.rows, span + 1);
    RETURN_IF_ERROR(values.VerifyRows(selected.ids.data() + begin, end - begin));
    for (int64_t j = begin; j < end; ++j) {
      v_rows[j] = values.Address(selected.ids[static_cast<size_t>(j)]);
    }
    kernels::SparseAttentionSpan(attention, span, estimated + rest);
    return absl::OkStatus();
  };
  const int64_t beside = request_.estimate ? 1 : 0;
  RETURN_IF_ERROR(ForEachPart(pool, {0, spans + beside}, 1, [&](RowRange unit) -> absl::Status {
    if (unit.begin >= beside) return attend(unit.begin - beside);
    return EstimateRestOf(token, kv_head, pool, selected, estimated);
  }));
  kernels::MergeSparseSpans(attention, estimated + rest);
  if (request_.estimate) {
    kernels::MergeStates(attention.out, attention.lse, estimated,
                         estimated + shape.group() * shape.head_dim, shape.group(), shape.head_dim);
  }
  return absl::OkStatus();
}

absl::Status QueryReply::EstimateRestOf(int64_t token, int32_t kv_head, ThreadPool* pool,
                                        const Selected& selected, float* state) const {
  const AttentionShape& shape = context().shape();
  ASSIGN_OR_RETURN(const std::shared_ptr<const Summaries> summaries,
                   context().HeadSummaries(request_.layer, KvHead(kv_head)));
  thread_local EstimateScratch scratch;
  retrieval::EstimateRequest estimate;
  estimate.queries = QueriesOf(token, kv_head);
  estimate.group = shape.group();
  estimate.scale = context().scale();
  estimate.zone = zone_;
  estimate.pool = pool;
  estimate.selected = selected.ids;
  estimate.scores = selected.scores.data();
  estimate.bound = selected.bound.empty() ? nullptr : selected.bound.data();
  estimate.out = state;
  estimate.lse = state + shape.group() * shape.head_dim;
  return EstimateRest(*summaries, heads_[kv_head]->values, estimate, scratch);
}

absl::Status QueryReply::RunAttendAll(ThreadPool& pool) {
  const AttentionShape& shape = context().shape();
  const std::vector<RowRange> cut =
      AttendCut(zone_, request_.tokens, shape.kv_heads, pool.threads() + 1);
  const int64_t heads = request_.tokens * shape.q_heads, floats = heads * shape.head_dim;
  std::fill_n(out_, floats, 0.0f);
  std::fill_n(lse_, heads, -INFINITY);
  // The states of part 0 are out_ and lse_; those of the others follow one another here.
  const size_t others = cut.empty() ? 0 : cut.size() - 1;
  const auto out = std::make_unique_for_overwrite<float[]>(others * static_cast<size_t>(floats));
  const auto lse = std::make_unique_for_overwrite<float[]>(others * static_cast<size_t>(heads));
  const auto out_of = [&](size_t p) { return p == 0 ? out_ : &out[(p - 1) * floats]; };
  const auto lse_of = [&](size_t p) { return p == 0 ? lse_ : &lse[(p - 1) * heads]; };
  const auto merge = [&](int32_t kv_head, size_t into, size_t p) {
    for (int64_t token = 0; token < request_.tokens; ++token) {
      const int64_t row = token * shape.q_heads + kv_head * shape.group();
      kernels::MergeStates(out_of(into) + row * shape.head_dim, lse_of(into) + row,
                           out_of(p) + row * shape.head_dim, lse_of(p) + row, shape.group(),
                           shape.head_dim);
    }
  };
  const int64_t length = AttendSpanLength(zone_);
  const auto merge_all = [&](int32_t kv_head) {
    for (size_t first = 0, next; first < cut.size(); first = next) {  // of a span
      for (next = first + 1; next < cut.size() && cut[next].begin < cut[first].begin + length;)
        merge(kv_head, first, next++);
      if (first > 0) merge(kv_head, 0, first);
    }
  };
  const auto units = static_cast<int64_t>(cut.size()) * shape.kv_heads;
  std::vector<std::atomic<size_t>> done(static_cast<size_t>(shape.kv_heads));
  // Who is done with the last part of a head merges them; one thread looks after the budget meanwhile.
  RETURN_IF_ERROR(ForEach(pool, units + 1, [&](int64_t i) -> absl::Status {
    if (i == units) {
      context().EnforceBudget();
      return absl::OkStatus();
    }
    const size_t p = static_cast<size_t>(i / shape.kv_heads);
    const int32_t kv_head = static_cast<int32_t>(i % shape.kv_heads);
    const int64_t first_q_head = int64_t{kv_head} * shape.group();
    context().TouchAlone(request_.layer);
    AttendSpanParams params;
    params.rows = heads_[kv_head].get();
    params.span = cut[p];
    params.queries = QueriesOf(0, kv_head);
    params.tokens = request_.tokens;
    params.query_stride = int64_t{shape.q_heads} * shape.head_dim;
    params.group = shape.group();
    params.scale = context().scale();
    params.cancelled = &slot_.session().cancelled();
    params.out = out_of(p) + first_q_head * shape.head_dim;
    params.out_stride = params.query_stride;
    params.lse = lse_of(p) + first_q_head;
    params.lse_stride = shape.q_heads;
    RETURN_IF_ERROR(AttendSpan(params));
    if (done[static_cast<size_t>(kv_head)].fetch_add(1) + 1 == cut.size()) merge_all(kv_head);
    return absl::OkStatus();
  }));
  for (size_t i = 0; request_.measure_mass && i < units_.size(); ++i) {
    const float* lse_here =
        &lse_[i * shape.group()];  // [tokens, kv_heads, group] is [tokens, q_heads]
    units_[i].zone_lse.assign(lse_here, lse_here + shape.group());
  }
  return absl::OkStatus();
}

std::vector<CandidateIds> QueryReply::TakeCandidates() {
  std::vector<CandidateIds> found;
  found.reserve(units_.size());
  for (Unit& unit : units_) found.push_back(std::move(unit.candidates));
  return found;
}

absl::StatusOr<bool> QueryReply::Confirm() {
  // Partial attention was made by Run, which looked after its last read.
  if (request_.want == Want::kAttend) return true;
  ASSIGN_OR_RETURN(const int64_t now, context().Look(request_.layer));
  if (now == seen_) return true;
  seen_ = now;
  next_unit_ = first_unit_;
  next_row_ = first_row_;
  RETURN_IF_ERROR(OpenHeads());
  return false;
}

absl::Status QueryReply::Next(int64_t max_bytes, std::vector<Piece>& pieces) {
  pieces.clear();
  first_unit_ = next_unit_;
  first_row_ = next_row_;
  const AttentionShape& shape = context().shape();
  const int64_t group = shape.group(), d = shape.head_dim;
  const bool attend = request_.want == Want::kAttend;
  const int64_t row_bytes = 8 + (wants_scores() ? 4 * group : 0) +
                            (request_.want == Want::kRows     ? 4 * d
                             : request_.want == Want::kValues ? 2 * d
                                                              : 0);
  for (int64_t room = max_bytes; !done();) {
    const Unit& unit = units_[next_unit_];
    const int64_t left = unit.rows - next_row_;
    room -= kPieceOverheadBytes + (attend || sends_rest() ? 4 * group * (d + 1) : 0) + 4 * group;
    if (!pieces.empty() && room < std::min(left, kLeastRows) * row_bytes) break;
    Piece piece;
    piece.token = static_cast<int64_t>(next_unit_) / shape.kv_heads;
    piece.kv_head = KvHead(static_cast<int32_t>(next_unit_ % shape.kv_heads));
    piece.first_row = next_row_;
    piece.rows = std::min(left, std::max<int64_t>(1, room / row_bytes));
    if (attend) {
      piece.out = {&out_[next_unit_ * group * d], static_cast<size_t>(group * d)};
      piece.lse = {&lse_[next_unit_ * group], static_cast<size_t>(group)};
    } else {
      RETURN_IF_ERROR(FillRows(piece, next_row_));
    }
    if (next_row_ == 0) {
      piece.zone_lse = unit.zone_lse;
      piece.rest = unit.candidates.rest.values();
    }
    room -= piece.rows * row_bytes;
    next_row_ += piece.rows;
    if (next_row_ == unit.rows) {
      next_row_ = 0;
      ++next_unit_;
    }
    pieces.push_back(std::move(piece));
    if (room <= 0) break;
  }
  return absl::OkStatus();
}

absl::Status QueryReply::FillRows(Piece& piece, int64_t first_row) const {
  const AttentionShape& shape = context().shape();
  const int64_t group = shape.group(), d = shape.head_dim, n = piece.rows;
  const Unit& unit =
      units_[static_cast<size_t>(piece.token) * shape.kv_heads + piece.kv_head.value()];
  const MappedHead& rows = *heads_[piece.kv_head.value()];
  piece.ids.resize(n);
  if (wants_scores()) piece.scores.resize(static_cast<size_t>(group * n));
  if (select::IsAll(request_.selection)) {
    const RowRange range{zone_.begin + first_row, zone_.begin + first_row + n};
    for (int64_t j = 0; j < n; ++j) piece.ids[j] = range.begin + j;
    if (wants_scores()) {
      RETURN_IF_ERROR(rows.keys.Verify(range));
      const float* queries = QueriesOf(piece.token, piece.kv_head.value());
      rows.keys.ForEachPiece(range, [&](Position at, const void* keys, int64_t count) {
        kernels::DotScore(queries, group, d, keys, count, context().scale(),
                          piece.scores.data() + (at - range.begin), n);
      });
    }
  } else {
    std::copy_n(unit.ids.begin() + first_row, n, piece.ids.begin());
    for (int64_t h = 0; wants_scores() && h < group; ++h) {
      std::copy_n(unit.scores.begin() + h * unit.rows + first_row, n, piece.scores.data() + h * n);
    }
  }
  std::vector<Position> missing;
  if (!request_.held.empty()) {
    const std::vector<Position>& held = request_.held[piece.kv_head.value()];
    for (Position id : piece.ids) {
      if (!std::binary_search(held.begin(), held.end(), id)) missing.push_back(id);
    }
  }
  const std::vector<Position>& wanted = request_.held.empty() ? piece.ids : missing;
  const auto point_at = [&](const Rows& from, std::vector<const void*>& to) -> absl::Status {
    RETURN_IF_ERROR(from.VerifyRows(wanted.data(), static_cast<int64_t>(wanted.size())));
    to.reserve(wanted.size());
    for (Position id : wanted) to.push_back(from.Address(id));
    return absl::OkStatus();
  };
  if (request_.want == Want::kRows) RETURN_IF_ERROR(point_at(rows.keys, piece.k));
  if (request_.want == Want::kRows || request_.want == Want::kValues) {
    RETURN_IF_ERROR(point_at(rows.values, piece.v));
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
