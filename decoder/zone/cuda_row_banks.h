// What:      what brings the rows that are chosen of a zone in pinned memory of this host to where attention reads
//            them: banks of the rows used last lie in device memory, and only rows that no bank holds cross the bus;
//            of a packed layer without a bank they are unpacked to where they lie together; with prefetch rows are
//            fetched ahead into the banks.
// Math:      a bank decides where a row is read, never which.
// Source:    HATA-off and Double Sparsity's double buffer (prefetch), the banks of HiP and
//            InfiniteHiP (docs/methods.md).
// Shapes:    those of cuda_zone_rows.h.
// Errors:    those of PlanBanks; ResourceExhausted pinned memory.
// Ownership: rows and the selector outlive it; its memory is that of the arena. Banks are each sequence's own.
// Threads:   one. Predict, Bring and CopyCounters only enqueue and can be captured.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/statistics.h"
#include "decoder/zone/bank_plan.h"
#include "decoder/zone/cuda_summaries.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/cuda_zone_rows.h"
#include "kernels/kv_view.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"

namespace carrel::decoder {

class CudaRowBanks {
 public:
  static absl::StatusOr<std::unique_ptr<CudaRowBanks>> Create(const HostZoneOptions& options,
                                                              const OpenedContext& context);

  // What is chosen of each layer, where there are no rows kAllRows; of it, what is fetched ahead.
  std::vector<int64_t> budgets() const;
  std::vector<int64_t> budgets_ahead() const;
  bool fetches_ahead() const { return plan_.most_ahead() > 0; }
  bool fetches_ahead(Layer layer) const { return plan_.ahead[Index(layer)] > 0; }
  // [layers]: whose rows are read by attention alone, a few at a time.
  const std::vector<bool>& packed() const { return packed_; }

  // Plans its memory, or lays it out; fills it, once the rows are there.
  void Lay(cuda::DeviceArena& arena);
  absl::Status Fill(const CudaZoneRows& rows, const CudaRowSelector* selector,
                    const cuda::Stream& stream);
  // Empties the banks and forgets what was counted.
  absl::Status Reset(const cuda::Stream& stream);

  // All rows of a layer that is not packed, or held.
  kernels::KvView AllRows(Layer layer) const {
    return plan_.slots[Index(layer)] > 0 ? Held(layer) : rows_->kv(layer);
  }
  // Adds what brings a selection to where it is read. fetched: Predict was called for this layer and token.
  CudaSummaries::SelectedRows Bring(Layer layer, const CudaSelection& selection, bool fetched,
                                    CudaZoneWork& work) const;
  // What has been enqueued on `stream` so far comes before the choice of rows; these travel on a
  // stream of their own until the layer attends.
  absl::Status Predict(Layer layer, const CudaQueries& queries, const cuda::Stream& stream) const;
  // Enqueues a copy of the counters, which Count reads once it is done.
  absl::Status CopyCounters(const cuda::Stream& stream) const;
  void Count(std::vector<LayerStatistics>& layers) const;

 private:
  CudaRowBanks(const HostZoneOptions& options, const OpenedContext& context, BankPlan plan);

  static size_t Index(Layer layer) { return static_cast<size_t>(layer.value()); }
  int64_t elements(int64_t rows) const { return heads_.kv_heads * rows * heads_.head_dim; }
  // The most rows that a packed layer without a bank attends to; 0: there is none.
  int64_t most_gathered() const;
  kernels::KvRows Held(Layer layer) const;
  kernels::RowBankShape BankOf(Layer layer) const;
  kernels::RowBankParams UseOf(Layer layer, const CudaSelection& selection,
                               kernels::RowBankPurpose purpose) const;
  kernels::GatherPackedRowsParams GatherOf(Layer layer, const CudaSelection& selection) const;
  absl::Status MakeAhead(const CudaRowSelector& selector);

  const kernels::RowMap map_;
  const AttentionShape heads_;
  const BankPlan plan_;
  std::vector<bool> packed_;
  std::vector<int64_t> held_at_, state_at_;  // of each layer, in memory; last what all take
  const CudaZoneRows* rows_ = nullptr;

  uint16_t* held_ = nullptr;  // rows in banks: of a layer K, then V
  uint8_t* state_ = nullptr;
  uint16_t* gathered_ = nullptr;  // of a packed layer without a bank: K, then V
  // Of what is used now, and of what is fetched ahead.
  struct Use {
    int32_t* slots = nullptr;
    uint8_t* workspace = nullptr;
  };
  Use now_, ahead_;
  kernels::RowBankCounters* counters_ = nullptr;  // [layers]
  cuda::PinnedBuffer<kernels::RowBankCounters> host_counters_;

  std::unique_ptr<CudaRowSelector> ahead_selector_;  // null: no layer is fetched ahead
  cuda::Stream ahead_stream_;
  std::vector<cuda::Event> query_ready_, rows_ready_;  // [layers]
};

}  // namespace carrel::decoder
