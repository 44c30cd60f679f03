// What:      the zone in pinned memory of this host, attended by the GPU: what the method keeps
//            (codes, labels) and banks of the rows used last lie in device memory, and only rows
//            that no bank holds cross the bus. Keys that a method reads to choose cross it, too; where
//            it reads none, a layer's rows are packed, and unpacked on the device.
// Math:      that of cuda_device_zone.h, bit for bit, whatever the banks hold: a bank decides where a row
//            is read, never which.
// Source:    HATA-off and Double Sparsity's double buffer (prefetch), the banks of HiP and
//            InfiniteHiP (docs/methods.md).
// Shapes:    those of cuda_zone_rows.h.
// Ownership: keeps neither client nor rows.
// Errors:    ResourceExhausted device or pinned memory; those of the store while it is filled.
// Threads:   one. Attend and FetchAhead only enqueue and can be captured.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/statistics.h"
#include "decoder/zone/bank_plan.h"
#include "decoder/zone/cuda_summaries.h"
#include "decoder/zone/cuda_zone_rows.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"

namespace carrel::decoder {

class StoreClient;

class CudaHostZone {
 public:
  // Device bytes. host_rows: where SelectorNeedsHostRows or estimate: then it has summaries.
  static absl::StatusOr<int64_t> Bytes(const BankPlan& plan, const BankConfig& bank,
                                       const SelectorConfig& selector, bool estimate,
                                       const AttentionShape& shape, RowRange zone,
                                       const HostRows* host_rows);
  // Copies the zone from `rows` if they are given, otherwise reads it from the store.
  static absl::StatusOr<CudaHostZone> Create(const BankPlan& plan, const BankConfig& bank,
                                             const SelectorConfig& selector, bool estimate,
                                             const AttentionShape& shape, RowRange zone,
                                             int64_t max_fetch_rows, StoreClient* client,
                                             const HostRows* rows, ThreadPool* pool,
                                             const cuda::Stream& stream);
  CudaHostZone() = default;

  // One token: q [q_heads, head_dim] bf16 -> out [q_heads, head_dim], lse [q_heads] f32.
  // phase: of the selector. after_fetch: FetchAhead was called for this layer and token.
  absl::Status Attend(Layer layer, const uint16_t* q, int64_t phase, bool after_fetch, float* out,
                      float* lse, const cuda::Stream& stream) const;

  // Whether rows of the layer are fetched ahead.
  bool fetches_ahead(Layer layer) const { return plan_.ahead[Index(layer)] > 0; }
  // Where the approximate query of a layer that fetches ahead goes: [q_heads, head_dim] bf16.
  uint16_t* approximate_q(Layer layer) const;
  // Once the query is there: what has been enqueued on `stream` so far comes before it. The rows
  // travel on a stream of their own until the layer's Attend.
  absl::Status FetchAhead(Layer layer, const cuda::Stream& stream) const;

  // Empties the banks and forgets what was counted.
  absl::Status Reset(const cuda::Stream& stream);
  // Enqueues a copy of the counters, which AddTo reads once it is done.
  absl::Status CopyCounters(const cuda::Stream& stream) const;
  void AddTo(std::vector<LayerStatistics>& layers) const;

  int64_t phases() const { return selector_ == nullptr ? 1 : selector_->phases(); }
  int64_t PhaseOf(int64_t step) const {
    return selector_ == nullptr ? 0 : selector_->PhaseOf(step);
  }
  // Rows that a token attends to in each KV head; where blocks or chunks at the zone's end are
  // short, at most.
  int64_t attended(Layer layer) const;

 private:
  static size_t Index(Layer layer) { return static_cast<size_t>(layer.value()); }
  uint16_t* held_k(Layer layer) const { return held_.data() + held_at_[Index(layer)]; }
  uint16_t* held_v(Layer layer) const;
  kernels::RowBankShape BankOf(Layer layer) const;
  kernels::RowBankParams UseOf(Layer layer, const CudaSelection& selection,
                               kernels::RowBankPurpose purpose) const;

  absl::Status Allocate();
  absl::Status MakeSelectors(const SelectorConfig& selector, RowRange zone, const HostRows* rows,
                             ThreadPool* pool, const cuda::Stream& stream);
  absl::Status FillDevice(const cuda::Stream& stream);
  absl::Status AttendTogether(const uint16_t* q, const uint16_t* k, const uint16_t* v, int64_t rows,
                              float* out, float* lse, const cuda::Stream& stream) const;
  absl::Status AttendGathered(Layer layer, const CudaSelection& selection, const uint16_t* q,
                              float* out, float* lse, const cuda::Stream& stream) const;
  // Joins what was not selected, where there are summaries.
  absl::Status EstimateRest(Layer layer, const uint16_t* q, const CudaSelection& selection,
                            const CudaSummaries::SelectedRows& rows, float* out, float* lse,
                            const cuda::Stream& stream) const;

  BankPlan plan_;
  BankConfig bank_;
  AttentionShape shape_;
  float scale_ = 0;
  int64_t splits_ = 0;
  CudaZoneRows rows_;
  // Null: every layer is dense; no layer is fetched ahead.
  std::unique_ptr<CudaRowSelector> selector_, ahead_selector_;
  CudaSummaries summaries_;  // of the estimation term; empty: there is none

  std::vector<int64_t> held_at_, state_at_;  // of each layer, in held_ and state_
  cuda::DeviceBuffer<uint16_t> held_;        // rows in banks: of a layer K, then V
  cuda::DeviceBuffer<uint8_t> state_;
  cuda::DeviceBuffer<uint16_t> gathered_;  // of a packed layer without a bank: K, then V
  cuda::DeviceBuffer<int32_t> slots_, ahead_slots_;
  cuda::DeviceBuffer<uint8_t> attention_workspace_, bank_workspace_, ahead_workspace_;
  cuda::DeviceBuffer<kernels::RowBankCounters> counters_;  // [layers]
  cuda::PinnedBuffer<kernels::RowBankCounters> host_counters_;

  // Of every second layer: one may still be read while the next is written.
  cuda::DeviceBuffer<uint16_t> approximate_q_;
  cuda::Stream ahead_stream_;
  std::vector<cuda::Event> query_here_, rows_here_;  // [layers]
};

}  // namespace carrel::decoder
