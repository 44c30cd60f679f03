// What:      a held zone whose rows lie in pinned memory of this host: what the method keeps (codes, labels) and
//            banks of the rows used last lie in device memory, and only rows that no bank holds cross the
//            bus. Keys that a method reads to choose cross it, too; where it reads none, a layer's rows are
//            packed, and unpacked on the device.
// Math:      that of cuda_device_zone.h, bit for bit, whatever the banks hold: a bank decides where a row is
//            read, never which.
// Source:    HATA-off and Double Sparsity's double buffer (prefetch), the banks of HiP and
//            InfiniteHiP (docs/methods.md).
// Shapes:    those of cuda_zone_rows.h.
// Errors:    those of cuda_held_zone.h and PlanBanks.
// Ownership: as OpenedContext; banks are each sequence's own.
// Threads:   one. Predict, too, only enqueues and can be captured.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/statistics.h"
#include "decoder/zone/bank_plan.h"
#include "decoder/zone/cuda_held_zone.h"
#include "decoder/zone/cuda_zone_rows.h"
#include "decoder/zone/opened_context.h"
#include "kernels/kv_view.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"

namespace carrel::decoder {

class CudaHostZone final : public CudaHeldZone {
 public:
  // context.rows are copied where they are given, otherwise the zone is read from the store.
  static absl::StatusOr<std::unique_ptr<CudaHostZone>> Create(const HostZoneOptions& options,
                                                              const OpenedContext& context);

  // Empties the banks and forgets what was counted.
  absl::Status Reset(const cuda::Stream& stream) override;

  int64_t predicted_tokens(int64_t) const override { return predicts_ ? 1 : 0; }
  bool predicts(Layer layer, int64_t n) const override {
    return n == 1 && plan_.ahead[Index(layer)] > 0;
  }

  // What has been enqueued on `stream` so far comes before the choice of rows; these travel on a
  // stream of their own until the layer attends.
  absl::Status Predict(Layer next, const CudaQueries& queries, const cuda::Stream& stream) override;
  // Enqueues a copy of the counters, which statistics() reads once it is done.
  absl::Status CopyCounters(const cuda::Stream& stream) override;

  std::vector<LayerStatistics> statistics() const override;

 private:
  // Of all sequences over the content.
  struct Rows {
    CudaZoneRows rows;
    model::GpuReservation reserved;
  };

  CudaHostZone(const HostZoneOptions& options, const OpenedContext& context, BankPlan plan);

  int64_t RowBytes() const override { return CudaZoneRows::DeviceBytes(heads_); }
  absl::Status HoldRows() override;
  std::shared_ptr<const void> rows_held() const override { return rows_; }
  CudaKeys Keys(cuda::PinnedBuffer<uint16_t>& room) const override;
  // Of a layer whose rows are not packed, or held.
  kernels::KvView AllRows(Layer layer) const override {
    return plan_.slots[Index(layer)] > 0 ? Held(layer) : rows().kv(layer);
  }
  Places Bring(Layer layer, const CudaSelection& selection, bool fetched,
               CudaZoneWork& work) const override;
  void LayPlace(cuda::DeviceArena& arena) override;
  absl::StatusOr<int64_t> BytesBeside() const override;
  absl::Status Fill(const cuda::Stream& stream) override;

  static size_t Index(Layer layer) { return static_cast<size_t>(layer.value()); }
  kernels::KvRows Held(Layer layer) const;
  kernels::RowBankShape BankOf(Layer layer) const;
  kernels::RowBankParams UseOf(Layer layer, const CudaSelection& selection,
                               kernels::RowBankPurpose purpose) const;
  // Of a packed layer without a bank: what brings the selection to where rows lie together.
  kernels::GatherPackedRowsParams GatherOf(Layer layer, const CudaSelection& selection) const;
  Shared<const Rows>::Made ReadRows() const;
  const CudaZoneRows& rows() const { return rows_->rows; }
  absl::Status MakeAhead();

  // What lies on the device beside the rows and the method.
  struct Memory {
    uint16_t* held = nullptr;  // rows in banks: of a layer K, then V
    uint8_t* state = nullptr;
    uint16_t* gathered = nullptr;  // of a packed layer without a bank: K, then V
    int32_t *slots = nullptr, *ahead_slots = nullptr;
    uint8_t *bank_workspace = nullptr, *ahead_workspace = nullptr;
    kernels::RowBankCounters* counters = nullptr;  // [layers]
  };

  const kernels::RowMap map_;
  const AttentionShape heads_;
  const BankPlan plan_;
  const bool predicts_;  // whether rows are fetched ahead at all
  std::shared_ptr<const Rows> rows_;
  std::unique_ptr<CudaRowSelector> ahead_selector_;  // null: no layer is fetched ahead

  std::vector<int64_t> held_at_, state_at_;  // of each layer, in memory_; last what all take
  Memory memory_;
  cuda::PinnedBuffer<kernels::RowBankCounters> host_counters_;

  cuda::Stream ahead_stream_;
  std::vector<cuda::Event> query_ready_, rows_ready_;  // [layers]
};

}  // namespace carrel::decoder
