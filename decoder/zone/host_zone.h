// What:   the zone in this host's memory where a method chooses its rows (but for exact, which a session
//         answers, store_zone.h): they are attended here.
// Math:   dense layers attend to every row of the zone, the others to what the selector selects
//         within the layer's budget; the partial attention is merged with the window's as the
//         store's is. A budget that covers the zone makes a layer dense.
//         Rows that were not selected count through the context's summaries, as at the store
//         (config.estimate).
// Source: decisions 017, 020.
// Errors: NotFound what the selector needs and the context lacks; FailedPrecondition estimate=on
//         without summaries; DataLoss damaged summaries.
// Ownership: keeps the rows. statistics [layers] outlives this.
// Threads: one; the pool shares the work of heads and tokens.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/row_selector.h"
#include "decoder/statistics.h"
#include "decoder/zone/opened_context.h"
#include "decoder/zone/zone_attention.h"

namespace carrel::decoder {

class HostZone final : public ZoneAttention {
 public:
  // context.rows are given.
  static absl::StatusOr<std::unique_ptr<HostZone>> Create(const HostZoneOptions& options,
                                                          const OpenedContext& context,
                                                          std::vector<LayerStatistics>* statistics);

  absl::Status Prefetch(Layer layer, const float* predicted_q, int64_t n) override;
  absl::Status Start(Layer layer, const float* q, int64_t n) override;
  absl::Status Finish(Layer layer, const float* q, int64_t n, Partial& partial) override;
  absl::Status Measure(Layer layer, const float* q, int64_t n, const Partial& zone,
                       const std::vector<float>& window_lse) override;
  absl::Status MeasureOutput(Layer layer, const float* q, int64_t n, const Partial& zone,
                             const Partial& window) override;
  void set_reading_prompt(bool reading) override { reading_prompt_ = reading; }
  void Cancel() override;

 private:
  HostZone(const OpenedContext& context, std::unique_ptr<RowSelector> selector,
           std::vector<LayerStatistics>* statistics);

  void AttendAll(Layer layer, const float* q, int64_t n, Partial& partial) const;
  // state: out [group, head_dim], lse [group].
  void AttendSpan(Layer layer, KvHead head, const float* q, int64_t token, RowRange span,
                  float* state) const;
  absl::Status AttendSelected(Layer layer, const float* q, int64_t n, Partial& partial);
  // One KV head of one token. bound: of the group, or null.
  absl::Status AttendRows(Layer layer, KvHead head, const float* q, int64_t token,
                          const std::vector<Position>& rows, const float* bound,
                          Partial& partial) const;

  const RetrievalConfig config_;
  const AttentionShape shape_;
  const RowRange zone_;
  const std::vector<select::Selection> selections_;
  const bool estimate_, prompt_takes_all_;
  const float scale_;
  const std::shared_ptr<const HostRows> rows_;
  const std::unique_ptr<RowSelector> selector_;
  ThreadPool* const pool_;
  std::vector<LayerStatistics>* const statistics_;
  std::vector<int64_t> steps_;          // [layers]: tokens generated so far
  std::vector<SelectedRows> selected_;  // [kv_heads], of the layer attended to last
  bool reading_prompt_ = false;
  Partial every_row_;  // of the layer measured last
};

}  // namespace carrel::decoder
