// What:    a session's part of a sequence's attention: asks for a layer's zone rows, ahead of time
//          where that is possible, and turns replies into (out, lse). The session is with a store, which
//          searches its index, or looks at every row mapped in this process (ScansHere).
//          Per layer and block of tokens: Prefetch (optional, with predicted queries, while the
//          layer before computes), Start (true queries), Finish.
// Source:  decisions 005 and 026.
//          speculative: candidates asked with q~ are refined with the true q: want = ROWS here,
//          otherwise at the store (among_candidates_of).
//          verified: they are used only where cos(q~, q) reaches the layer's threshold; below it
//          the true query is sent and waited for. The threshold is calibrated on the prompt's own
//          tokens: the least cosine from which on the candidates held verified_hit_rate of the true
//          top_k on average (docs/decisions).
// Math:    dense layers read every row of the zone: the result is exact attention over it.
// Ownership: as OpenedContext.
// Threads: one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "decoder/client/row_stream.h"
#include "decoder/config.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"
#include "decoder/zone/candidate_rows.h"
#include "decoder/zone/opened_context.h"
#include "decoder/zone/retrieval_meter.h"
#include "decoder/zone/row_cache.h"
#include "decoder/zone/store_queries.h"
#include "decoder/zone/threshold.h"
#include "decoder/zone/zone_attention.h"
#include "retrieval/session.h"

namespace carrel::decoder {

class StoreZone final : public ZoneAttention {
 public:
  explicit StoreZone(OpenedContext context);

  absl::Status Prefetch(Layer layer, const float* predicted_q, int64_t n) override;
  absl::Status Start(Layer layer, const float* q, int64_t n) override;
  absl::Status Finish(Layer layer, const float* q, int64_t n, Partial& partial) override;

  // What retrieval_meter.h measures, where config or calibration want it; thresholds learn from it.
  absl::Status Measure(Layer layer, const float* q, int64_t n, const Partial& zone,
                       const Partial& window) override;

  std::string batch_key() const override { return queries_.batch_key(); }

  void Cancel() override;

 private:
  // What is in flight or at hand for one layer.
  struct Pending {
    std::optional<retrieval::RequestId> speculative;  // candidates asked with q~
    std::vector<float> predicted_q;
    std::optional<CandidateRows> candidates;    // ROWS that speculative or the true query brought
    std::optional<retrieval::RequestId> query;  // asked with the true q
    bool attends = false;                       // instead: the client attends when it is waited for
    std::optional<RowStream> stream;            // every row, under want = ROWS
    bool accepted = false;                      // speculative candidates are what is attended
    std::vector<double> cosines;                // [n], least over q heads
  };

  bool calibrating(Layer layer) const;
  // The slots that RowCache::Slots gave when the config was checked.
  std::vector<int64_t> CacheSlots() const;
  absl::Status StartSelected(Layer layer, const float* q, int64_t n, Pending& pending);
  std::vector<double> Cosines(const float* a, const float* b, int64_t n) const;

  absl::Status FinishRowStream(Layer layer, const float* q, int64_t n, Pending& pending,
                               Partial& partial);
  absl::Status FinishCandidates(Layer layer, const float* q, int64_t n, Pending& pending,
                                Partial& partial);
  absl::Status FinishPartials(Layer layer, const float* q, int64_t n, Pending& pending,
                              Partial& partial);
  absl::Status MergeValues(const retrieval::Part& part, int64_t n, std::vector<int64_t>& rows_seen,
                           Partial& partial);

  const StoreQueries queries_;
  retrieval::Session* const client_;
  const RetrievalMeter meter_;
  RowCache row_cache_;
  std::vector<Pending> pending_;       // [layers]
  std::vector<Threshold> thresholds_;  // [layers]; calibrated while a prompt is read
};

}  // namespace carrel::decoder
