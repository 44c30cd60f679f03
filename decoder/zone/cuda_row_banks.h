// What:      the zone's rows where the GPU reads them (CudaZoneRows): on the device as they are; or in pinned memory of
//            this host, of each layer as they are, or packed (kernels/rows/packed_rows), which takes three quarters
//            of the bytes. And what brings the chosen ones of these to where attention reads them (CudaRowBanks): banks
//            of the rows used last lie in device memory, and only rows that no bank holds cross the bus; of a packed
//            layer without a bank they are unpacked to where they lie together; with prefetch rows are fetched ahead
//            into the banks.
// Math:      a bank decides where a row is read, never which.
// Source:    HATA-off and Double Sparsity's double buffer (prefetch), the banks of HiP and
//            InfiniteHiP (docs/methods.md).
// Shapes:    of a layer as it is: k, v [kv_heads, rows, head_dim] bf16; packed: [kv_heads, rows,
//            PackedRowBytes(head_dim)].
// Errors:    ResourceExhausted device or pinned memory; those of the store.
// Ownership: rows keep nothing of the context. Rows and the selector outlive banks, whose memory is that of the arena.
//            Banks are each sequence's own.
// Threads:   rows: any, once made. Banks: one; Predict, Bring and CopyCounters only enqueue and can be captured.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "common/thread_pool.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/statistics.h"
#include "decoder/window/cuda_window.h"
#include "decoder/zone/bank_plan.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "kernels/kv_view.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"

namespace carrel::decoder {

class CudaZoneRows {
 public:
  // packed: [layers], of rows in pinned memory: they are copied from context.rows if these are given. Empty: they
  // lie on the device. What is not copied is read from the store.
  static absl::StatusOr<CudaZoneRows> Create(const OpenedContext& context,
                                             std::vector<bool> packed);
  // What that takes of the device.
  static int64_t DeviceBytes(const OpenedContext& context, bool on_device);
  CudaZoneRows() = default;

  bool is_packed(Layer layer) const {
    return !packed_.empty() && packed_[static_cast<size_t>(layer.value())];
  }
  // Of a layer that is not packed.
  kernels::KvView kv(Layer layer) const;
  // Of one that is.
  kernels::PackedRows packed(Layer layer) const;
  // Its keys [kv_heads, rows, head_dim], as they were.
  void UnpackKeys(Layer layer, ThreadPool* pool, uint16_t* keys) const;

  // K and V of one row, as they cross the bus.
  int64_t row_bytes(Layer layer) const;

 private:
  // Consecutive rows of one head, counted from the zone's first.
  void Take(Layer layer, KvHead head, int64_t first, int64_t rows, const void* k, const void* v);
  void ChooseTops(Layer layer, KvHead head, int64_t rows, const void* k, const void* v);
  absl::Status ReadFromStore(const OpenedContext& context);
  void CopyFrom(const HostRows& source, ThreadPool* pool);
  size_t HeadIndex(Layer layer, KvHead head) const {
    return static_cast<size_t>(layer.value() * shape_.kv_heads + head.value());
  }

  AttentionShape shape_;
  RowRange zone_;
  CudaWindow on_device_;
  std::vector<bool> packed_;
  int64_t layer_elements_ = 0;  // of k, and of v
  std::vector<int64_t> at_;     // of each layer in bytes_
  cuda::PinnedBuffer<uint8_t> bytes_;
  std::vector<kernels::PackedHead> heads_;  // [layers, kv_heads]
  cuda::DeviceBuffer<kernels::PackedHead> device_heads_;
  std::unique_ptr<kernels::ExceptionPieces> adding_;  // until they are all there
  cuda::PinnedBuffer<kernels::RowPiece> exceptions_;
};

class CudaRowBanks {
 public:
  CudaRowBanks(const HostZoneOptions& options, const AttentionShape& shape, BankPlan plan);

  // What is fetched ahead of each layer, where there is nothing kAllRows.
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
  CudaPlaces Bring(Layer layer, const CudaSelection& selection, bool fetched,
                   CudaZoneWork& work) const;
  // What has been enqueued on `stream` so far comes before the choice of rows; these travel on a
  // stream of their own until the layer attends.
  absl::Status Predict(Layer layer, const CudaQueries& queries, const cuda::Stream& stream) const;
  // Enqueues a copy of the counters, which Count reads once it is done.
  absl::Status CopyCounters(const cuda::Stream& stream) const;
  void Count(std::vector<LayerStatistics>& layers) const;

 private:
  static size_t Index(Layer layer) { return static_cast<size_t>(layer.value()); }
  int64_t elements(int64_t rows) const { return heads_.kv_heads * rows * heads_.head_dim; }
  kernels::KvRows Held(Layer layer) const;
  kernels::RowBankShape BankOf(Layer layer) const;
  kernels::RowBankParams UseOf(Layer layer, const CudaSelection& selection,
                               kernels::RowBankPurpose purpose) const;

  const kernels::RowMap map_;
  const AttentionShape heads_;
  const BankPlan plan_;
  std::vector<bool> packed_;
  int64_t most_gathered_ = 0;  // rows that a packed layer without a bank attends to
  const CudaZoneRows* rows_ = nullptr;

  struct Bank {
    uint16_t* rows = nullptr;  // K, then V
    uint8_t* state = nullptr;
  };
  std::vector<Bank> banks_;       // [layers]
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
