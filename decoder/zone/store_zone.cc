#include "decoder/zone/store_zone.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/time/clock.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/status.h"
#include "decoder/client/wire.h"
#include "decoder/zone/output_error.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"

namespace carrel::decoder {
namespace {

v1::Want WireWant(Want want) {
  switch (want) {
    case Want::kRows:
      return v1::ROWS;
    case Want::kValues:
      return v1::VALUES;
    case Want::kAttend:
      return v1::ATTEND;
  }
  return v1::WANT_UNSPECIFIED;
}

// The floats of a tensor, which need not be aligned inside the message.
std::vector<float> CopyFloats(const v1::Tensor& tensor) {
  std::vector<float> values(tensor.data().size() / sizeof(float));
  std::memcpy(values.data(), tensor.data().data(), values.size() * sizeof(float));
  return values;
}

absl::Status CheckHead(const v1::HeadResult& head, int64_t tokens, int64_t kv_heads) {
  if (head.token() < tokens && head.kv_head() < kv_heads) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("reply: token ", head.token(), " kv_head ",
                                          head.kv_head(), " was not asked for"));
}

}  // namespace

StoreZone::StoreZone(const RetrievalConfig& config, const AttentionShape& shape,
                     const v1::OpenReply& opened, StoreClient* client, ThreadPool* pool,
                     std::vector<LayerStatistics>* statistics)
    : config_(config),
      shape_(shape),
      zone_{opened.zone_begin(), opened.zone_end()},
      estimate_(Estimates(config, opened.manifest())),
      max_top_k_(opened.limits().max_top_k()),
      max_fetch_rows_(opened.limits().max_fetch_rows()),
      budgets_(LayerBudgets(config, shape.layers, zone_.rows())),
      scale_(1.0f / std::sqrt(static_cast<float>(shape.head_dim))),
      client_(client),
      pool_(pool),
      statistics_(statistics),
      row_cache_(shape, CacheSlots()),
      pending_(shape.layers),
      thresholds_(shape.layers) {
  for (int32_t layer = 0; layer < shape.layers; ++layer)
    (*statistics_)[layer].top_k = budgets_[layer];
}

std::vector<int64_t> StoreZone::CacheSlots() const {
  const auto slots = RowCache::Slots(config_, shape_, budgets_, zone_.rows());
  CARREL_CHECK(slots.ok());  // Decoder::Open asked
  return *slots;
}

bool StoreZone::calibrating(Layer layer) const {
  return config_.prefetch == Prefetch::kVerified && reading_prompt_ &&
         budgets_[layer.value()] != kAllRows &&
         thresholds_[layer.value()].samples() < Threshold::kEnough;
}

v1::Query StoreZone::MakeQuery(Layer layer, const float* q, int64_t n) const {
  v1::Query query;
  query.set_layer(layer.value());
  SetFloats(q, {n, shape_.q_heads, shape_.head_dim}, query.mutable_queries());
  const int64_t budget = budgets_[layer.value()];
  if (budget == kAllRows) {
    query.mutable_select()->set_all(true);
  } else if (budget == kAsSelected) {
    if (config_.select == Select::kRange)
      query.mutable_select()->set_range(static_cast<float>(config_.range));
    if (config_.select == Select::kMass)
      query.mutable_select()->set_mass(static_cast<float>(config_.mass));
    query.mutable_select()->set_max_rows(config_.max_rows);
  } else {
    query.mutable_select()->set_top_k(budget);
    if (config_.select == Select::kFidelity) {
      for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next())
        query.add_head_top_k(HeadBudget(config_, layer, head, shape_.kv_heads));
    }
  }
  query.set_want(WireWant(config_.want));
  query.set_effort(static_cast<uint32_t>(config_.effort));
  query.set_estimate(estimate_ && budget != kAllRows);
  return query;
}

absl::Status StoreZone::Prefetch(Layer layer, const float* approximate_q, int64_t n) {
  if (config_.prefetch == Prefetch::kOff || zone_.rows() == 0) return absl::OkStatus();
  Pending& pending = pending_[layer.value()];
  const int64_t budget = budgets_[layer.value()];
  if (budget == kAllRows) {
    // All rows are the same whatever the query; partial attention needs the true one, so there is
    // nothing to ask ahead.
    if (config_.want != Want::kRows) return absl::OkStatus();
    pending.stream.emplace(client_, shape_, layer, zone_, max_fetch_rows_);
    return pending.stream->Start();
  }
  v1::Query query = MakeQuery(layer, approximate_q, n);
  query.mutable_select()->set_top_k(RowsAhead(layer));
  query.clear_head_top_k();
  query.set_speculative(true);
  query.set_estimate(false);
  query.set_want(config_.want == Want::kRows ? v1::ROWS : v1::IDS);
  if (config_.want == Want::kRows) row_cache_.Declare(layer, query);
  ASSIGN_OR_RETURN(pending.speculative, client_->Send(std::move(query)));
  pending.approximate_q.assign(approximate_q, approximate_q + n * shape_.q_heads * shape_.head_dim);
  return absl::OkStatus();
}

int64_t StoreZone::RowsAhead(Layer layer) const {
  const auto budget = static_cast<double>(budgets_[layer.value()]);
  return std::min<int64_t>({std::llround(config_.oversample * budget), zone_.rows(), max_top_k_});
}

std::vector<double> StoreZone::Cosines(const float* a, const float* b, int64_t n) const {
  const int64_t d = shape_.head_dim;
  std::vector<double> least(n, 1.0);
  for (int64_t i = 0; i < n * shape_.q_heads; ++i) {
    double ab = 0, aa = 0, bb = 0;
    for (int64_t c = 0; c < d; ++c) {
      ab += double{a[i * d + c]} * b[i * d + c];
      aa += double{a[i * d + c]} * a[i * d + c];
      bb += double{b[i * d + c]} * b[i * d + c];
    }
    const double cosine = aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : 0;
    least[i / shape_.q_heads] = std::min(least[i / shape_.q_heads], cosine);
  }
  return least;
}

absl::Status StoreZone::Start(Layer layer, const float* q, int64_t n) {
  LayerStatistics& statistics = StatisticsOf(layer);
  statistics.tokens += n;
  if (zone_.rows() == 0) return absl::OkStatus();
  Pending& pending = pending_[layer.value()];
  if (budgets_[layer.value()] != kAllRows) return StartTopK(layer, q, n, pending);
  if (config_.want == Want::kRows) {
    if (pending.stream.has_value()) {
      statistics.prefetched += n;
      return absl::OkStatus();
    }
    pending.stream.emplace(client_, shape_, layer, zone_, max_fetch_rows_);
    return pending.stream->Start();
  }
  ASSIGN_OR_RETURN(pending.query, client_->Send(MakeQuery(layer, q, n)));
  return absl::OkStatus();
}

absl::Status StoreZone::StartTopK(Layer layer, const float* q, int64_t n, Pending& pending) {
  LayerStatistics& statistics = StatisticsOf(layer);
  pending.accepted = false;
  if (pending.speculative.has_value()) {
    pending.cosines = Cosines(pending.approximate_q.data(), q, n);
    for (double cosine : pending.cosines) statistics.cosine.Add(cosine);
    const double worst = *std::min_element(pending.cosines.begin(), pending.cosines.end());
    pending.accepted = config_.prefetch == Prefetch::kSpeculative ||
                       (!calibrating(layer) &&
                        worst >= thresholds_[layer.value()].value(config_.verified_hit_rate));
    (pending.accepted ? statistics.prefetched : statistics.verified_again) += n;
    if (pending.accepted && config_.want == Want::kRows) return absl::OkStatus();
  }
  v1::Query query = MakeQuery(layer, q, n);
  if (pending.accepted) query.set_among_candidates_of(*pending.speculative);
  if (config_.want == Want::kRows) row_cache_.Declare(layer, query);
  ASSIGN_OR_RETURN(pending.query, client_->Send(std::move(query)));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::SessionReply>> StoreZone::Receive(RequestId id,
                                                                 LayerStatistics* statistics) {
  std::vector<v1::SessionReply> parts;
  do {
    const absl::Time start = absl::Now();
    ASSIGN_OR_RETURN(v1::SessionReply part, client_->Next(id));
    if (statistics != nullptr) {
      statistics->exposed_wait_us += absl::ToDoubleMicroseconds(absl::Now() - start);
      statistics->bytes_received += static_cast<int64_t>(part.ByteSizeLong());
      statistics->candidates += part.query().statistics().candidates();
      statistics->visited += part.query().statistics().visited();
    }
    parts.push_back(std::move(part));
  } while (!parts.back().last());
  return parts;
}

absl::Status StoreZone::Finish(Layer layer, const float* q, int64_t n, Partial& partial) {
  partial.Reset(n, shape_.q_heads, shape_.head_dim);
  if (zone_.rows() == 0) return absl::OkStatus();
  Pending& pending = pending_[layer.value()];
  if (pending.stream.has_value()) return FinishRowStream(layer, q, n, pending, partial);
  if (config_.want == Want::kRows) return FinishCandidates(layer, q, n, pending, partial);
  return FinishPartials(layer, q, n, pending, partial);
}

absl::Status StoreZone::FinishRowStream(Layer layer, const float* q, int64_t n, Pending& pending,
                                        Partial& partial) {
  const int64_t d = shape_.head_dim, group = shape_.group();
  LayerStatistics& statistics = StatisticsOf(layer);
  const absl::Status status = pending.stream->Drain(
      [&](KvHead head, Position, int64_t rows, const void* k, const void* v) {
        statistics.candidates += rows * n;
        std::vector<const void*> k_rows(rows), v_rows(rows);
        for (int64_t j = 0; j < rows; ++j) {
          k_rows[j] = static_cast<const char*>(k) + j * d * 2;
          v_rows[j] = static_cast<const char*>(v) + j * d * 2;
        }
        pool_->ParallelFor(n, [&](int64_t token) {
          thread_local std::vector<float> scores, out;
          scores.resize(static_cast<size_t>(group * rows));
          out.resize(static_cast<size_t>(group * (d + 1)));
          kernels::SparseAttentionParams params;
          params.q = q + (token * shape_.q_heads + head.value() * group) * d;
          params.group = group;
          params.k = k_rows.data();
          params.v = v_rows.data();
          params.rows = rows;
          params.head_dim = d;
          params.scale = scale_;
          params.scores = scores.data();
          params.out = out.data();
          params.lse = out.data() + group * d;
          kernels::SparseAttention(params);
          partial.Merge(token, shape_.q_heads, head.value() * group, group, d, params.out,
                        params.lse);
        });
      },
      &statistics.exposed_wait_us, &statistics.bytes_received);
  pending.stream.reset();
  statistics.rows_attended += zone_.rows() * shape_.kv_heads * n;
  return status;
}

absl::Status StoreZone::FinishCandidates(Layer layer, const float* q, int64_t n, Pending& pending,
                                         Partial& partial) {
  LayerStatistics& statistics = StatisticsOf(layer);
  const RequestId id = pending.accepted ? *pending.speculative : *pending.query;
  ASSIGN_OR_RETURN(std::vector<v1::SessionReply> parts, Receive(id, &statistics));
  Candidates candidates(shape_, zone_, n);
  for (v1::SessionReply& part : parts)
    RETURN_IF_ERROR(candidates.AddPart(std::move(part), /*with_rows=*/true, &row_cache_, layer));
  RETURN_IF_ERROR(candidates.CheckComplete());
  const int64_t budget = budgets_[layer.value()];
  const auto budget_of = [&](KvHead head) {
    if (budget == kAsSelected) return INT64_MAX;
    return config_.select == Select::kFidelity ? HeadBudget(config_, layer, head, shape_.kv_heads)
                                               : budget;
  };
  statistics.rows_attended += candidates.Attend(q, budget_of, scale_, pool_, partial);
  if (row_cache_.keeps(layer)) candidates.KeepIn(row_cache_, layer, statistics.bank);
  if (pending.accepted) {
    pending.candidates.emplace(std::move(candidates));
  } else if (pending.speculative.has_value() && (config_.measure || calibrating(layer))) {
    // What was asked ahead is not attended, but tells how good it would have been.
    ASSIGN_OR_RETURN(std::vector<v1::SessionReply> ahead, Receive(*pending.speculative, nullptr));
    pending.candidates.emplace(shape_, zone_, n);
    for (v1::SessionReply& part : ahead)
      RETURN_IF_ERROR(pending.candidates->AddPart(std::move(part), /*with_rows=*/false));
    RETURN_IF_ERROR(pending.candidates->CheckComplete());
  }
  pending.query.reset();
  return absl::OkStatus();
}

absl::Status StoreZone::FinishPartials(Layer layer, const float*, int64_t n, Pending& pending,
                                       Partial& partial) {
  LayerStatistics& statistics = StatisticsOf(layer);
  ASSIGN_OR_RETURN(const std::vector<v1::SessionReply> parts, Receive(*pending.query, &statistics));
  pending.query.reset();
  std::vector<int64_t> seen(static_cast<size_t>(n) * shape_.kv_heads, 0);
  for (const v1::SessionReply& part : parts) {
    statistics.rows_attended += part.query().statistics().rows();
    statistics.estimated = estimate_ && budgets_[layer.value()] != kAllRows;
    if (config_.want == Want::kValues) {
      RETURN_IF_ERROR(MergeValues(layer, part.query(), n, seen, partial));
    } else {
      RETURN_IF_ERROR(MergeAttend(part.query(), n, partial));
      for (const v1::HeadResult& head : part.query().heads())
        ++seen[head.token() * shape_.kv_heads + head.kv_head()];
    }
  }
  const int64_t budget = budgets_[layer.value()];
  for (size_t i = 0; i < seen.size(); ++i) {
    const bool complete = config_.want == Want::kAttend ? seen[i] == 1
                          : budget == kAllRows          ? seen[i] == zone_.rows()
                                                        : seen[i] >= 1;
    if (complete) continue;
    return absl::DataLossError(absl::StrCat("reply: layer ", layer.value(), " token ",
                                            i / shape_.kv_heads, " kv_head ", i % shape_.kv_heads,
                                            " is incomplete (", seen[i], ")"));
  }
  return absl::OkStatus();
}

absl::Status StoreZone::MergeAttend(const v1::QueryReply& reply, int64_t n, Partial& partial) {
  const int64_t d = shape_.head_dim, group = shape_.group();
  for (const v1::HeadResult& head : reply.heads()) {
    RETURN_IF_ERROR(CheckHead(head, n, shape_.kv_heads));
    RETURN_IF_ERROR(CheckFloats(head.out(), {group, d}, "out"));
    RETURN_IF_ERROR(CheckFloats(head.lse(), {group}, "lse"));
    const std::vector<float> out = CopyFloats(head.out()), lse = CopyFloats(head.lse());
    partial.Merge(head.token(), shape_.q_heads, head.kv_head() * group, group, d, out.data(),
                  lse.data());
  }
  return absl::OkStatus();
}

absl::Status StoreZone::MergeValues(Layer, const v1::QueryReply& reply, int64_t n,
                                    std::vector<int64_t>& rows_seen, Partial& partial) {
  const int64_t d = shape_.head_dim, group = shape_.group();
  std::vector<float> out(static_cast<size_t>(group * (d + 1)));
  std::vector<const void*> v_rows;
  for (const v1::HeadResult& head : reply.heads()) {
    RETURN_IF_ERROR(CheckHead(head, n, shape_.kv_heads));
    const int64_t rows = Dimension(head.v(), 0);
    RETURN_IF_ERROR(CheckBf16(head.v(), {rows, d}, "V rows"));
    RETURN_IF_ERROR(CheckFloats(head.scores(), {group, rows}, "scores"));
    std::vector<float> scores = CopyFloats(head.scores());
    v_rows.resize(rows);
    for (int64_t j = 0; j < rows; ++j) v_rows[j] = head.v().data().data() + j * d * 2;
    kernels::SparseAttentionParams params;
    params.group = group;
    params.v = v_rows.data();
    params.rows = rows;
    params.head_dim = d;
    params.scores = scores.data();
    params.out = out.data();
    params.lse = out.data() + group * d;
    kernels::SparseAttention(params);
    partial.Merge(head.token(), shape_.q_heads, head.kv_head() * group, group, d, params.out,
                  params.lse);
    rows_seen[head.token() * shape_.kv_heads + head.kv_head()] += rows;
  }
  return absl::OkStatus();
}

absl::StatusOr<Candidates> StoreZone::ReceiveIds(v1::Query query, int64_t n,
                                                 std::vector<float>* zone_lse) {
  query.set_want(v1::IDS);
  query.set_measure_mass(zone_lse != nullptr);
  query.set_estimate(false);
  ASSIGN_OR_RETURN(const RequestId id, client_->Send(std::move(query)));
  ASSIGN_OR_RETURN(std::vector<v1::SessionReply> parts, Receive(id, nullptr));
  Candidates ids(shape_, zone_, n);
  if (zone_lse != nullptr) zone_lse->assign(static_cast<size_t>(n) * shape_.q_heads, -INFINITY);
  std::vector<bool> with_lse(static_cast<size_t>(n) * shape_.kv_heads);
  for (v1::SessionReply& part : parts) {
    for (const v1::HeadResult& head : part.query().heads()) {
      RETURN_IF_ERROR(CheckHead(head, n, shape_.kv_heads));
      const size_t at = static_cast<size_t>(head.token()) * shape_.kv_heads + head.kv_head();
      // Where a head's rows come in several parts, the first has it.
      if (zone_lse == nullptr || (with_lse[at] && !head.has_zone_lse())) continue;
      with_lse[at] = true;
      RETURN_IF_ERROR(CheckFloats(head.zone_lse(), {shape_.group()}, "zone_lse"));
      std::memcpy(&(*zone_lse)[static_cast<size_t>(head.token()) * shape_.q_heads +
                               head.kv_head() * shape_.group()],
                  head.zone_lse().data().data(), shape_.group() * sizeof(float));
    }
    RETURN_IF_ERROR(ids.AddPart(std::move(part), /*with_rows=*/false));
  }
  RETURN_IF_ERROR(ids.CheckComplete());
  return ids;
}

absl::StatusOr<Candidates> StoreZone::ReceiveIdsAmong(Layer layer, const float* q, int64_t n,
                                                      int64_t top_k, RequestId candidates) {
  v1::Query query = MakeQuery(layer, q, n);
  query.mutable_select()->set_top_k(top_k);
  if (top_k != budgets_[layer.value()]) query.clear_head_top_k();
  query.set_among_candidates_of(candidates);
  return ReceiveIds(std::move(query), n, nullptr);
}

absl::StatusOr<std::vector<float>> StoreZone::LseOfRows(Layer layer, const float* q, int64_t n,
                                                        std::optional<RequestId> among) {
  v1::Query query = MakeQuery(layer, q, n);
  query.set_estimate(false);
  if (among.has_value()) query.set_among_candidates_of(*among);
  ASSIGN_OR_RETURN(const RequestId id, client_->Send(std::move(query)));
  ASSIGN_OR_RETURN(const std::vector<v1::SessionReply> parts, Receive(id, nullptr));
  Partial rows;
  rows.Reset(n, shape_.q_heads, shape_.head_dim);
  for (const v1::SessionReply& part : parts) RETURN_IF_ERROR(MergeAttend(part.query(), n, rows));
  return std::move(rows.lse);
}

absl::Status StoreZone::AddHits(Layer layer, const float* q, int64_t n, const Candidates& truth,
                                bool measure) {
  Pending& pending = pending_[layer.value()];
  LayerStatistics& statistics = StatisticsOf(layer);
  const auto add_shares = [&](const Candidates& found, Mean& mean, bool to_threshold) {
    for (int64_t token = 0; token < n; ++token) {
      Mean hits;
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        hits.Add(ShareFound(truth.ids(token, KvHead(head)), found.ids(token, KvHead(head))));
      }
      if (measure) mean.Add(hits.value());
      if (to_threshold && calibrating(layer)) {
        thresholds_[layer.value()].Add(pending.cosines[token], hits.value());
      }
    }
  };
  if (pending.candidates.has_value()) {
    add_shares(*pending.candidates, statistics.hit_rate, true);
    return absl::OkStatus();
  }
  // The candidates are at the store: which are they, and which of them does the true query choose?
  if (measure) {
    ASSIGN_OR_RETURN(const Candidates ahead,
                     ReceiveIdsAmong(layer, q, n, RowsAhead(layer), *pending.speculative));
    add_shares(ahead, statistics.hit_rate, false);
  }
  ASSIGN_OR_RETURN(const Candidates chosen,
                   ReceiveIdsAmong(layer, q, n, budgets_[layer.value()], *pending.speculative));
  add_shares(chosen, statistics.kept_rate, true);
  return absl::OkStatus();
}

absl::Status StoreZone::Measure(Layer layer, const float* q, int64_t n, const Partial& zone,
                                const std::vector<float>& window_lse) {
  Pending& pending = pending_[layer.value()];
  const bool measure = config_.measure && zone_.rows() > 0;
  const bool hit_rate = pending.speculative.has_value() && (measure || calibrating(layer));
  LayerStatistics& statistics = StatisticsOf(layer);
  if (budgets_[layer.value()] == kAllRows) {
    if (measure) {
      statistics.mass.Add(1);
      statistics.attended_mass.Add(1);
    }
  } else if (measure || hit_rate) {
    std::vector<float> zone_lse;
    ASSIGN_OR_RETURN(const Candidates truth,
                     ReceiveIds(MakeQuery(layer, q, n), n, measure ? &zone_lse : nullptr));
    if (hit_rate) RETURN_IF_ERROR(AddHits(layer, q, n, truth, measure));
    std::vector<float> rows_lse = zone.lse;
    if (measure && estimate_) {  // zone.lse counts rows that were not attended, too
      ASSIGN_OR_RETURN(rows_lse, LseOfRows(layer, q, n, pending.speculative));
    }
    for (size_t i = 0; measure && i < zone_lse.size(); ++i) {
      const double top = std::max(zone_lse[i], window_lse[i]);
      const double all = std::exp(zone_lse[i] - top) + std::exp(window_lse[i] - top);
      statistics.mass.Add(std::exp(double{rows_lse[i]} - zone_lse[i]));
      statistics.attended_mass.Add((std::exp(rows_lse[i] - top) + std::exp(window_lse[i] - top)) /
                                   all);
    }
  }
  if (pending.speculative.has_value()) client_->Forget(*pending.speculative);
  pending.speculative.reset();
  pending.candidates.reset();
  return absl::OkStatus();
}

absl::Status StoreZone::MeasureOutput(Layer layer, const float* q, int64_t n, const Partial& zone,
                                      const Partial& window) {
  if (!config_.measure || zone_.rows() == 0) return absl::OkStatus();
  if (budgets_[layer.value()] == kAllRows) {
    for (int64_t i = 0; i < n; ++i) StatisticsOf(layer).output_error.Add(0);
    return absl::OkStatus();
  }
  v1::Query query;
  query.set_layer(layer.value());
  SetFloats(q, {n, shape_.q_heads, shape_.head_dim}, query.mutable_queries());
  query.mutable_select()->set_all(true);
  query.set_want(v1::ATTEND);
  ASSIGN_OR_RETURN(const RequestId id, client_->Send(std::move(query)));
  ASSIGN_OR_RETURN(const std::vector<v1::SessionReply> parts, Receive(id, nullptr));
  Partial dense;
  dense.Reset(n, shape_.q_heads, shape_.head_dim);
  for (const v1::SessionReply& part : parts) RETURN_IF_ERROR(MergeAttend(part.query(), n, dense));
  AddOutputErrors(window, zone, dense, n, shape_, StatisticsOf(layer).output_error);
  return absl::OkStatus();
}

void StoreZone::Cancel() {
  for (Pending& pending : pending_) {
    if (pending.speculative.has_value()) client_->Forget(*pending.speculative);
    if (pending.query.has_value()) client_->Forget(*pending.query);
    if (pending.stream.has_value()) pending.stream->Cancel();
  }
  pending_ = std::vector<Pending>(pending_.size());
}

}  // namespace carrel::decoder
