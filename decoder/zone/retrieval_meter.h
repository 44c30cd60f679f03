// What:      how good a zone's attention was: hit rate of what was asked ahead, mass of what is attended,
//            error of the output. Asks the store beside what is attended, and steers nothing.
// Math:      mass: sum of exp(score - lse) of the attended rows over the zone, or over zone and window.
//            Hit rate: share of the true top_k among other rows, as sets.
// Errors:    those of the store.
// Ownership: queries outlive it.
// Threads:   one.
#pragma once

#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"
#include "decoder/zone/candidate_rows.h"
#include "decoder/zone/store_queries.h"
#include "retrieval/session.h"

namespace carrel::decoder {

// To mass and attended_mass, of n tokens' q heads: zone_lse of every row of the zone, rows_lse of those
// attended, window_lse of what the decoder holds.
void AddMass(const std::vector<float>& zone_lse, const std::vector<float>& rows_lse,
             const std::vector<float>& window_lse, LayerStatistics& statistics);

class RetrievalMeter {
 public:
  explicit RetrievalMeter(const StoreQueries* queries) : queries_(*queries) {}

  // What was asked ahead for the layer's block of tokens.
  struct Ahead {
    std::optional<retrieval::RequestId> request;
    const CandidateRows* candidates = nullptr;  // null: they are at the store
  };
  // The share of the true top_k that the candidates asked ahead gave, of each of n tokens; empty if
  // none were asked, or neither measuring nor calibrating wants to know.
  absl::StatusOr<std::vector<double>> Measure(Layer layer, const float* q, int64_t n,
                                              const Ahead& ahead, bool calibrates,
                                              const Partial& zone, const Partial& window,
                                              LayerStatistics& statistics) const;
  // The error of the output against attention over every row.
  absl::Status MeasureOutput(Layer layer, const float* q, int64_t n, const Partial& zone,
                             const Partial& window, LayerStatistics& statistics) const;

 private:
  // What a query for ids brings; zone_lse, if it is wanted: [n, q_heads].
  absl::StatusOr<CandidateRows> AskIds(retrieval::Query query, int64_t n,
                                       std::vector<float>* zone_lse) const;
  // Of candidates that the store keeps, the best for the true query.
  absl::StatusOr<CandidateRows> AskIdsAmong(Layer layer, const float* q, int64_t n, int64_t top_k,
                                            retrieval::RequestId candidates) const;
  // Of the rows that the same query attends to, without the estimation term; [n, q_heads].
  absl::StatusOr<std::vector<float>> LseOfRows(Layer layer, const float* q, int64_t n,
                                               std::optional<retrieval::RequestId> among) const;
  absl::StatusOr<std::vector<double>> Hits(Layer layer, const float* q, int64_t n,
                                           const Ahead& ahead, const CandidateRows& truth,
                                           LayerStatistics& statistics) const;

  const StoreQueries& queries_;
  // Whether to the statistics; otherwise only hits that a threshold is calibrated by.
  const bool measures_ = queries_.context().config.measure;
};

}  // namespace carrel::decoder
