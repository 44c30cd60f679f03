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
// Ownership: keeps the rows.
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
                                                          const OpenedContext& context);

  absl::Status Start(Layer layer, const float* q, int64_t n) override;
  absl::Status Finish(Layer layer, const float* q, int64_t n, Partial& partial) override;
  absl::Status Measure(Layer layer, const float* q, int64_t n, const Partial& zone,
                       const Partial& window) override;
  void Cancel() override;

 private:
  HostZone(OpenedContext context, std::unique_ptr<RowSelector> selector);

  void AttendAll(Layer layer, const float* q, int64_t n, Partial& partial) const;
  absl::Status AttendSelected(Layer layer, const float* q, int64_t n, Partial& partial);
  // One KV head of one token. bound: of the group, or null.
  absl::Status AttendChosen(Layer layer, KvHead head, const float* q, int64_t token,
                            const std::vector<Position>& rows, const float* bound,
                            Partial& partial) const;

  const HostRows& rows_;
  const bool estimate_, prompt_takes_all_;
  const std::unique_ptr<RowSelector> selector_;
  std::vector<int64_t> steps_;          // [layers]: tokens generated so far
  std::vector<SelectedRows> selected_;  // [kv_heads], of the layer attended to last
};

}  // namespace carrel::decoder
