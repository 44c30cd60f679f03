// What:      the zone in pinned memory of this host, attended by the GPU: what the method keeps
//            (codes, labels) and banks of the rows used last lie in device memory, and only rows
//            that no bank holds cross the bus. Keys that a method reads to choose cross it, too; where
//            it reads none, a layer's rows are packed, and unpacked on the device.
// Math:      that of cuda_device_zone.h, bit for bit, whatever the banks hold: a bank decides where a row
//            is read, never which.
// Source:    HATA-off and Double Sparsity's double buffer (prefetch), the banks of HiP and
//            InfiniteHiP (docs/methods.md).
// Shapes:    those of cuda_zone_rows.h.
// Ownership: as OpenedContext. Rows, and what method=hash keeps of them, are shared with other sequences
//            over the same content; banks are each one's own.
// Errors:    ResourceExhausted device or pinned memory; those of the store while it is filled.
// Threads:   one. Attend and Predict only enqueue and can be captured.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/statistics.h"
#include "decoder/zone/bank_plan.h"
#include "decoder/zone/cuda_shared.h"
#include "decoder/zone/cuda_summaries.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/cuda_zone_rows.h"
#include "decoder/zone/opened_context.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/kv_view.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"
#include "model/device.h"

namespace carrel::decoder {

class CudaHostZone final : public CudaZoneAttention {
 public:
  // context.rows are copied where they are given, otherwise the zone is read from the store; they are
  // given where SelectorNeedsHostRows or estimate=on: then they have summaries. The zone is not empty.
  static absl::StatusOr<std::unique_ptr<CudaHostZone>> Create(const HostZoneOptions& options,
                                                              const OpenedContext& context);

  absl::StatusOr<int64_t> Bytes() const override;
  absl::StatusOr<int64_t> ShareableBytes() const override;
  bool shareable_held() const override { return CudaShared<Parts>::Held(key_); }
  absl::Status Load(int64_t block, const cuda::Stream& stream) override;
  // Empties the banks and forgets what was counted.
  absl::Status Reset(const cuda::Stream& stream) override;

  int64_t phases() const override { return selector_ == nullptr ? 1 : selector_->phases(); }
  int64_t PhaseOf(int64_t step) const override {
    return selector_ == nullptr ? 0 : selector_->PhaseOf(step);
  }
  int64_t predicted_tokens(int64_t) const override { return predicts_ ? 1 : 0; }
  bool predicts(Layer layer, int64_t n) const override { return n == 1 && fetches_ahead(layer); }

  // What has been enqueued on `stream` so far comes before the choice of rows; these travel on a
  // stream of their own until the layer's Attend.
  absl::Status Predict(Layer next, const CudaQueries& queries, const cuda::Stream& stream) override;
  absl::Status Attend(Layer layer, const CudaQueries& queries, int64_t phase, const CudaPartial& to,
                      const cuda::Stream& stream) override;
  bool AddWork(Layer layer, const uint16_t* q, const CudaPartial& to,
               CudaZoneWork& work) const override;
  // Enqueues a copy of the counters, which AddTo reads once it is done.
  absl::Status CopyCounters(const cuda::Stream& stream) override;

  void AddTo(std::vector<LayerStatistics>& layers) const override;

 private:
  CudaHostZone(const HostZoneOptions& options, const OpenedContext& context, BankPlan plan);

  // Whether rows of the layer are fetched ahead.
  bool fetches_ahead(Layer layer) const { return plan_.ahead[Index(layer)] > 0; }
  int64_t attended(Layer layer) const override;
  int64_t AttendedPerHead(Layer layer) const;  // the most of any KV head
  // Of the method; of its fork, where rows are fetched ahead.
  CudaZoneShape ShapeOf(bool ahead) const;
  // Where the method is calibrated by them.
  const HostRows* RowsForSelector() const;
  static size_t Index(Layer layer) { return static_cast<size_t>(layer.value()); }
  kernels::KvRows Held(Layer layer) const;
  // Of a layer whose rows are not packed, or held: where attention reads them.
  kernels::KvView RowsOf(Layer layer) const {
    return plan_.slots[Index(layer)] > 0 ? Held(layer) : rows().kv(layer);
  }
  // Where `rows` of each KV head are gathered.
  kernels::KvRows Gathered(int64_t rows) const;
  kernels::RowBankShape BankOf(Layer layer) const;
  kernels::RowBankParams UseOf(Layer layer, const CudaSelection& selection,
                               kernels::RowBankPurpose purpose) const;

  // Of all sequences over the content.
  struct Parts {
    cuda::DeviceArena arena;  // of the rows' heads
    CudaZoneRows rows;
    // That others are made from; null: each sequence makes its own.
    std::unique_ptr<CudaRowSelector> selector;
    model::GpuReservation reserved;
  };
  kernels::PackedHead* LayHeads(cuda::DeviceArena& arena) const;
  CudaShared<Parts>::Made MakeParts(const cuda::Stream& stream) const;
  absl::StatusOr<std::unique_ptr<CudaRowSelector>> MakeSelector(const CudaZoneRows& rows,
                                                                const cuda::Stream& stream) const;
  bool shares_selector() const { return plan_.most_chosen() > 0 && SelectorForks(method_); }
  const CudaZoneRows& rows() const { return parts_->rows; }

  // What lies on the device beside these and the method.
  struct Memory {
    uint16_t* held = nullptr;  // rows in banks: of a layer K, then V
    uint8_t* state = nullptr;
    uint16_t* gathered = nullptr;  // of a packed layer without a bank: K, then V
    int32_t *slots = nullptr, *ahead_slots = nullptr;
    uint8_t *attention_workspace = nullptr, *bank_workspace = nullptr, *ahead_workspace = nullptr;
    kernels::RowBankCounters* counters = nullptr;  // [layers]
    CudaSummaries summaries;                       // of the estimation term; empty: there is none
  };
  // Plans it, or lays it out.
  Memory Lay(cuda::DeviceArena& arena) const;

  absl::Status Allocate();
  absl::Status MakeSelectors(const cuda::Stream& stream);
  absl::Status FillDevice(const cuda::Stream& stream);
  // One token. after_fetch: Predict was called for this layer and token.
  absl::Status AttendToken(Layer layer, const uint16_t* q, int64_t phase, bool after_fetch,
                           const CudaPartial& to, const cuda::Stream& stream) const;
  // Attention to all rows that there is room for in kv; to what was selected, where it lies; and, of
  // a packed layer without a bank, what brings that to where rows lie together.
  kernels::WindowAttentionCudaParams ToAll(const uint16_t* q, const kernels::KvView& kv,
                                           const CudaPartial& to) const;
  kernels::SparseAttentionCudaParams ToChosen(Layer layer, const CudaSelection& selection,
                                              const uint16_t* q, const CudaPartial& to) const;
  kernels::GatherPackedRowsParams GatherOf(Layer layer, const CudaSelection& selection) const;
  bool gathers(Layer layer) const {
    return plan_.slots[Index(layer)] == 0 && rows().is_packed(layer);
  }
  // Joins what was not selected, where there are summaries.
  absl::Status EstimateRest(Layer layer, const uint16_t* q, const CudaSelection& selection,
                            const CudaSummaries::SelectedRows& rows, float* out, float* lse,
                            const cuda::Stream& stream) const;

  const OpenedContext context_;
  const kernels::RowMap map_;
  const AttentionShape shape_;
  const SelectorConfig method_;
  const BankPlan plan_;
  const bool predicts_;  // whether rows are fetched ahead at all
  const float scale_;
  const int64_t splits_;
  const std::string key_;  // of its parts
  std::shared_ptr<const Parts> parts_;
  // Null: every layer is dense; no layer is fetched ahead.
  std::unique_ptr<CudaRowSelector> selector_, ahead_selector_;

  std::vector<int64_t> held_at_, state_at_;  // of each layer, in memory_; last what all take
  cuda::DeviceArena arena_;
  Memory memory_;
  cuda::PinnedBuffer<kernels::RowBankCounters> host_counters_;

  cuda::Stream ahead_stream_;
  std::vector<cuda::Event> query_ready_, rows_ready_;  // [layers]
};

}  // namespace carrel::decoder
