#include "decoder/zone/retrieval_meter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/status.h"
#include "decoder/zone/output_error.h"

namespace carrel::decoder {

void AddMass(const std::vector<float>& zone_lse, const std::vector<float>& rows_lse,
             const std::vector<float>& window_lse, LayerStatistics& statistics) {
  for (size_t i = 0; i < zone_lse.size(); ++i) {
    const double top = std::max(zone_lse[i], window_lse[i]);
    const double all = std::exp(zone_lse[i] - top) + std::exp(window_lse[i] - top);
    statistics.mass.Add(std::exp(double{rows_lse[i]} - zone_lse[i]));
    statistics.attended_mass.Add((std::exp(rows_lse[i] - top) + std::exp(window_lse[i] - top)) /
                                 all);
  }
}

absl::StatusOr<CandidateRows> RetrievalMeter::AskIds(retrieval::Query query, int64_t n,
                                                     std::vector<float>* zone_lse) const {
  query.want = Want::kIds;
  query.measure_mass = zone_lse != nullptr;
  query.estimate = false;
  ASSIGN_OR_RETURN(const retrieval::RequestId id, queries_.client()->Send(std::move(query)));
  ASSIGN_OR_RETURN(std::vector<retrieval::Part> parts, queries_.Receive(id, nullptr));
  const AttentionShape& shape = queries_.shape();
  CandidateRows ids(shape, queries_.zone(), n);
  if (zone_lse != nullptr) zone_lse->assign(static_cast<size_t>(n) * shape.q_heads, -INFINITY);
  std::vector<bool> with_lse(static_cast<size_t>(n) * shape.kv_heads);
  for (retrieval::Part& part : parts) {
    for (const retrieval::Piece& piece : part.pieces) {
      RETURN_IF_ERROR(queries_.CheckPiece(piece, n));
      const auto at = static_cast<size_t>(piece.token * shape.kv_heads + piece.kv_head.value());
      // Where a head's rows come in several parts, the first has it.
      if (zone_lse == nullptr || (with_lse[at] && piece.zone_lse.empty())) continue;
      with_lse[at] = true;
      if (static_cast<int32_t>(piece.zone_lse.size()) != shape.group())
        return absl::DataLossError(absl::StrCat("reply: zone_lse of ", piece.zone_lse.size()));
      std::copy(piece.zone_lse.begin(), piece.zone_lse.end(),
                zone_lse->begin() + static_cast<int64_t>(at) * shape.group());
    }
    RETURN_IF_ERROR(ids.AddPart(std::move(part), /*with_rows=*/false));
  }
  RETURN_IF_ERROR(ids.CheckComplete());
  return ids;
}

absl::StatusOr<CandidateRows> RetrievalMeter::AskIdsAmong(Layer layer, const float* q, int64_t n,
                                                          int64_t top_k,
                                                          retrieval::RequestId candidates) const {
  retrieval::Query query = queries_.Make(layer, q, n);
  if (top_k != select::TopKRows(queries_.selection(layer))) query.selection = select::TopK{top_k};
  query.among_candidates_of = candidates;
  return AskIds(std::move(query), n, nullptr);
}

absl::StatusOr<std::vector<float>> RetrievalMeter::LseOfRows(
    Layer layer, const float* q, int64_t n, std::optional<retrieval::RequestId> among) const {
  retrieval::Query query = queries_.Make(layer, q, n);
  query.estimate = false;
  if (among.has_value()) query.among_candidates_of = *among;
  ASSIGN_OR_RETURN(const retrieval::RequestId id, queries_.client()->Send(std::move(query)));
  ASSIGN_OR_RETURN(const std::vector<retrieval::Part> parts, queries_.Receive(id, nullptr));
  Partial rows;
  rows.Reset(n, queries_.shape());
  for (const retrieval::Part& part : parts) RETURN_IF_ERROR(queries_.MergeAttend(part, n, rows));
  return std::move(rows.lse);
}

absl::StatusOr<std::vector<double>> RetrievalMeter::Hits(Layer layer, const float* q, int64_t n,
                                                         const Ahead& ahead,
                                                         const CandidateRows& truth,
                                                         LayerStatistics& statistics) const {
  const auto shares = [&](const CandidateRows& found, Mean& mean) {
    std::vector<double> of_tokens;
    for (int64_t token = 0; token < n; ++token) {
      Mean hits;
      for (int32_t head = 0; head < queries_.shape().kv_heads; ++head) {
        hits.Add(ShareFound(truth.ids(token, KvHead(head)), found.ids(token, KvHead(head))));
      }
      if (measures_) mean.Add(hits.value());
      of_tokens.push_back(hits.value());
    }
    return of_tokens;
  };
  if (ahead.candidates != nullptr) return shares(*ahead.candidates, statistics.hit_rate);
  // The candidates are at the store: which are they, and which of them does the true query choose?
  if (measures_) {
    ASSIGN_OR_RETURN(const CandidateRows asked,
                     AskIdsAmong(layer, q, n, queries_.RowsAhead(layer), *ahead.request));
    shares(asked, statistics.hit_rate);
  }
  ASSIGN_OR_RETURN(
      const CandidateRows chosen,
      AskIdsAmong(layer, q, n, select::TopKRows(queries_.selection(layer)), *ahead.request));
  return shares(chosen, statistics.kept_rate);
}

absl::StatusOr<std::vector<double>> RetrievalMeter::Measure(Layer layer, const float* q, int64_t n,
                                                            const Ahead& ahead, bool calibrates,
                                                            const Partial& zone,
                                                            const Partial& window,
                                                            LayerStatistics& statistics) const {
  const bool measures = measures_ && queries_.zone().rows() > 0;
  const bool hits_wanted = ahead.request.has_value() && (measures || calibrates);
  std::vector<double> hits;
  if (queries_.all_rows(layer)) {
    if (!measures) return hits;
    statistics.mass.Add(1);
    statistics.attended_mass.Add(1);
    return hits;
  }
  if (!measures && !hits_wanted) return hits;
  std::vector<float> zone_lse;
  ASSIGN_OR_RETURN(const CandidateRows truth,
                   AskIds(queries_.Make(layer, q, n), n, measures ? &zone_lse : nullptr));
  if (hits_wanted) {
    ASSIGN_OR_RETURN(hits, Hits(layer, q, n, ahead, truth, statistics));
  }
  if (!measures) return hits;
  std::vector<float> rows_lse = zone.lse;
  if (queries_.estimates()) {  // zone.lse counts rows that were not attended, too
    ASSIGN_OR_RETURN(rows_lse, LseOfRows(layer, q, n, ahead.request));
  }
  AddMass(zone_lse, rows_lse, window.lse, statistics);
  return hits;
}

absl::Status RetrievalMeter::MeasureOutput(Layer layer, const float* q, int64_t n,
                                           const Partial& zone, const Partial& window,
                                           LayerStatistics& statistics) const {
  if (!measures_ || queries_.zone().rows() == 0 || window.out.empty()) return absl::OkStatus();
  if (queries_.all_rows(layer)) {
    for (int64_t i = 0; i < n; ++i) statistics.output_error.Add(0);
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const retrieval::RequestId id,
                   queries_.client()->Send(queries_.MakeDense(layer, q, n)));
  ASSIGN_OR_RETURN(const std::vector<retrieval::Part> parts, queries_.Receive(id, nullptr));
  Partial dense;
  dense.Reset(n, queries_.shape());
  for (const retrieval::Part& part : parts) RETURN_IF_ERROR(queries_.MergeAttend(part, n, dense));
  AddOutputErrors(window, zone, dense, n, queries_.shape(), statistics.output_error);
  return absl::OkStatus();
}

}  // namespace carrel::decoder
