#include "decoder/zone/store_zone.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/status.h"
#include "decoder/zone/make_zone.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
StoreZone::StoreZone(OpenedContext context)
    : ZoneAttention(std::move(context)),
      queries_(&context_),
      client_(context_.client),
      meter_(&queries_),
      row_cache_(shape_, CacheSlots()),
      pending_(shape_.layers),
      thresholds_(shape_.layers) {}

std::vector<int64_t> StoreZone::CacheSlots() const {
  const auto slots = RowCache::Slots(config_, shape_, context_.selections, zone_.rows());
  CARREL_CHECK(slots.ok());  // Decoder::Open asked
  return *slots;
}

bool StoreZone::calibrating(Layer layer) const {
  return config_.prefetch == Prefetch::kVerified && reading_prompt_ && !queries_.all_rows(layer) &&
         thresholds_[layer.value()].samples() < Threshold::kEnough;
}

absl::Status StoreZone::Prefetch(Layer layer, const float* predicted_q, int64_t n) {
  if (config_.prefetch == Prefetch::kOff || zone_.rows() == 0) return absl::OkStatus();
  Pending& pending = pending_[layer.value()];
  if (queries_.all_rows(layer)) {
    // All rows are the same whatever the query; partial attention needs the true one, so there is
    // nothing to ask ahead.
    if (config_.want != Want::kRows) return absl::OkStatus();
    pending.stream.emplace(client_, shape_, layer, zone_, context_.max_fetch_rows);
    return pending.stream->Start();
  }
  retrieval::Query query = queries_.MakeAhead(layer, predicted_q, n);
  if (config_.want == Want::kRows) query.held = row_cache_.Held(layer);
  ASSIGN_OR_RETURN(pending.speculative, client_->Send(std::move(query)));
  pending.predicted_q.assign(predicted_q, predicted_q + n * shape_.q_heads * shape_.head_dim);
  return absl::OkStatus();
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
  LayerStatistics& statistics = statistics_of(layer);
  statistics.tokens += n;
  if (zone_.rows() == 0) return absl::OkStatus();
  Pending& pending = pending_[layer.value()];
  pending.attends =
      config_.want == Want::kAttend && client_->attends() && !pending.speculative.has_value();
  if (pending.attends) return absl::OkStatus();
  if (!queries_.all_rows(layer)) return StartSelected(layer, q, n, pending);
  if (config_.want == Want::kRows) {
    if (pending.stream.has_value()) {
      statistics.prefetched += n;
      return absl::OkStatus();
    }
    pending.stream.emplace(client_, shape_, layer, zone_, context_.max_fetch_rows);
    return pending.stream->Start();
  }
  ASSIGN_OR_RETURN(pending.query, client_->Send(queries_.Make(layer, q, n)));
  return absl::OkStatus();
}

absl::Status StoreZone::StartSelected(Layer layer, const float* q, int64_t n, Pending& pending) {
  LayerStatistics& statistics = statistics_of(layer);
  pending.accepted = false;
  if (pending.speculative.has_value()) {
    pending.cosines = Cosines(pending.predicted_q.data(), q, n);
    for (double cosine : pending.cosines) statistics.cosine.Add(cosine);
    const double worst = *std::min_element(pending.cosines.begin(), pending.cosines.end());
    pending.accepted = config_.prefetch == Prefetch::kSpeculative ||
                       (!calibrating(layer) &&
                        worst >= thresholds_[layer.value()].value(config_.verified_hit_rate));
    (pending.accepted ? statistics.prefetched : statistics.verified_again) += n;
    if (pending.accepted && config_.want == Want::kRows) return absl::OkStatus();
  }
  retrieval::Query query = queries_.Make(layer, q, n);
  if (pending.accepted) query.among_candidates_of = *pending.speculative;
  if (config_.want == Want::kRows) query.held = row_cache_.Held(layer);
  ASSIGN_OR_RETURN(pending.query, client_->Send(std::move(query)));
  return absl::OkStatus();
}

absl::Status StoreZone::Finish(Layer layer, const float* q, int64_t n, Partial& partial) {
  partial.Reset(n, shape_);
  if (zone_.rows() == 0) return absl::OkStatus();
  Pending& pending = pending_[layer.value()];
  if (pending.attends) {
    LayerStatistics& statistics = statistics_of(layer);
    const bool all = reading_prompt_ && queries_.prompt_takes_all();
    statistics.whole_tokens += all ? n : 0;
    statistics.whole_rows += all ? zone_.rows() * shape_.kv_heads * n : 0;
    return queries_.Attend(layer, q, n, all, partial, statistics);
  }
  if (pending.stream.has_value()) return FinishRowStream(layer, q, n, pending, partial);
  if (config_.want == Want::kRows) return FinishCandidates(layer, q, n, pending, partial);
  return FinishPartials(layer, q, n, pending, partial);
}

absl::Status StoreZone::FinishRowStream(Layer layer, const float* q, int64_t n, Pending& pending,
                                        Partial& partial) {
  LayerStatistics& statistics = statistics_of(layer);
  absl::Status status = pending.stream->Drain(
      [&](KvHead head, Position, int64_t rows, const void* k, const void* v) {
        statistics.candidates += rows * n;
        std::vector<const void*> k_rows(rows), v_rows(rows);
        for (int64_t j = 0; j < rows; ++j) {
          k_rows[j] = static_cast<const char*>(k) + j * shape_.head_dim * 2;
          v_rows[j] = static_cast<const char*>(v) + j * shape_.head_dim * 2;
        }
        pool_->ParallelFor(
            n, [&](int64_t token) { partial.Attend(shape_, token, head, q, k_rows, v_rows); });
      },
      &statistics.exposed_wait_us, &statistics.bytes_received);
  pending.stream.reset();
  statistics.rows_attended += zone_.rows() * shape_.kv_heads * n;
  return status;
}

absl::Status StoreZone::FinishCandidates(Layer layer, const float* q, int64_t n, Pending& pending,
                                         Partial& partial) {
  LayerStatistics& statistics = statistics_of(layer);
  const retrieval::RequestId id = pending.accepted ? *pending.speculative : *pending.query;
  ASSIGN_OR_RETURN(std::vector<retrieval::Part> parts, queries_.Receive(id, &statistics));
  CandidateRows candidates(shape_, zone_, n);
  for (retrieval::Part& part : parts)
    RETURN_IF_ERROR(candidates.AddPart(std::move(part), /*with_rows=*/true, &row_cache_, layer));
  RETURN_IF_ERROR(candidates.CheckComplete());
  const auto* const top_k = std::get_if<select::TopK>(&queries_.selection(layer));
  const auto budget_of = [&](KvHead head) {
    return top_k == nullptr ? INT64_MAX : top_k->Of(head);
  };
  statistics.rows_attended += candidates.Attend(q, budget_of, pool_, partial);
  if (row_cache_.keeps(layer)) candidates.KeepIn(row_cache_, layer, statistics.bank);
  if (pending.accepted) {
    pending.candidates.emplace(std::move(candidates));
  } else if (pending.speculative.has_value() && (config_.measure || calibrating(layer))) {
    // What was asked ahead is not attended, but tells how good it would have been.
    ASSIGN_OR_RETURN(std::vector<retrieval::Part> ahead,
                     queries_.Receive(*pending.speculative, nullptr));
    pending.candidates.emplace(shape_, zone_, n);
    for (retrieval::Part& part : ahead)
      RETURN_IF_ERROR(pending.candidates->AddPart(std::move(part), /*with_rows=*/false));
    RETURN_IF_ERROR(pending.candidates->CheckComplete());
  }
  pending.query.reset();
  return absl::OkStatus();
}

absl::Status StoreZone::FinishPartials(Layer layer, const float*, int64_t n, Pending& pending,
                                       Partial& partial) {
  LayerStatistics& statistics = statistics_of(layer);
  ASSIGN_OR_RETURN(const std::vector<retrieval::Part> parts,
                   queries_.Receive(*pending.query, &statistics));
  pending.query.reset();
  std::vector<int64_t> seen(static_cast<size_t>(n) * shape_.kv_heads, 0);
  for (const retrieval::Part& part : parts) {
    statistics.rows_attended += part.statistics.rows;
    statistics.estimated = queries_.estimates() && !queries_.all_rows(layer);
    if (config_.want == Want::kValues) {
      RETURN_IF_ERROR(MergeValues(part, n, seen, partial));
    } else {
      RETURN_IF_ERROR(queries_.MergeAttend(part, n, partial));
      for (const retrieval::Piece& piece : part.pieces)
        ++seen[piece.token * shape_.kv_heads + piece.kv_head.value()];
    }
  }
  const bool all = queries_.all_rows(layer);
  for (size_t i = 0; i < seen.size(); ++i) {
    const bool complete = config_.want == Want::kAttend ? seen[i] == 1
                          : all                         ? seen[i] == zone_.rows()
                                                        : seen[i] >= 1;
    if (complete) continue;
    return absl::DataLossError(absl::StrCat("reply: layer ", layer.value(), " token ",
                                            i / shape_.kv_heads, " kv_head ", i % shape_.kv_heads,
                                            " is incomplete (", seen[i], ")"));
  }
  return absl::OkStatus();
}

absl::Status StoreZone::MergeValues(const retrieval::Part& part, int64_t n,
                                    std::vector<int64_t>& rows_seen, Partial& partial) {
  const int64_t d = shape_.head_dim, group = shape_.group();
  std::vector<float> out(static_cast<size_t>(group * (d + 1))), scores;
  for (const retrieval::Piece& piece : part.pieces) {
    RETURN_IF_ERROR(queries_.CheckPiece(piece, n));
    const auto rows = static_cast<int64_t>(piece.v.size());
    if (static_cast<int64_t>(piece.scores.size()) != group * rows) {
      return absl::DataLossError(absl::StrCat("reply: ", piece.scores.size(), " scores of ", group,
                                              " q heads for ", rows, " V rows"));
    }
    scores = piece.scores;
    auto params = kernels::OfHeads<kernels::SparseAttentionParams>(shape_);
    params.v = piece.v.data();
    params.rows = rows;
    params.scores = scores.data();
    params.out = out.data();
    params.lse = out.data() + group * d;
    kernels::SparseAttention(params);
    partial.Merge(shape_, piece.token, piece.kv_head, out.data());
    rows_seen[piece.token * shape_.kv_heads + piece.kv_head.value()] += rows;
  }
  return absl::OkStatus();
}

absl::Status StoreZone::Measure(Layer layer, const float* q, int64_t n, const Partial& zone,
                                const Partial& window) {
  Pending& pending = pending_[layer.value()];
  ASSIGN_OR_RETURN(
      const std::vector<double> hits,
      meter_.Measure(layer, q, n,
                     {.request = pending.speculative,
                      .candidates = pending.candidates ? &*pending.candidates : nullptr},
                     calibrating(layer), zone, window, statistics_of(layer)));
  for (size_t token = 0; token < hits.size() && calibrating(layer); ++token)
    thresholds_[layer.value()].Add(pending.cosines[token], hits[token]);
  if (pending.speculative.has_value()) client_->Forget(*pending.speculative);
  pending.speculative.reset();
  pending.candidates.reset();
  return meter_.MeasureOutput(layer, q, n, zone, window, statistics_of(layer));
}

void StoreZone::Cancel() {
  for (Pending& pending : pending_) {
    if (pending.speculative.has_value()) client_->Forget(*pending.speculative);
    if (pending.query.has_value()) client_->Forget(*pending.query);
    if (pending.stream.has_value()) pending.stream->Cancel();
  }
  pending_ = std::vector<Pending>(pending_.size());
}

absl::StatusOr<std::unique_ptr<ZoneAttention>> MakeStoreZone(const OpenedContext& context) {
  return std::make_unique<StoreZone>(context);
}

}  // namespace carrel::decoder
