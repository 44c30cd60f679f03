// What:      the zone's rows in pinned memory of this host, where the GPU reads them: of each layer as
//            they are, or packed (kernels/rows/packed_rows), which takes three quarters of the bytes.
// Shapes:    of a layer as it is: k, v [kv_heads, rows, head_dim] bf16; packed: [kv_heads, rows,
//            PackedRowBytes(head_dim)].
// Ownership: keeps nothing of the context.
// Errors:    ResourceExhausted pinned memory; those of the store.
// Threads:   any, once made.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/zone/zone_attention.h"
#include "kernels/kv_view.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"

namespace carrel::decoder {

class CudaZoneRows {
 public:
  // packed: [layers]. Copies the zone from context.rows if they are given, otherwise reads it from the
  // store.
  static absl::StatusOr<CudaZoneRows> Create(const OpenedContext& context,
                                             std::vector<bool> packed);
  // What that takes of the device.
  static int64_t DeviceBytes(const AttentionShape& shape);
  CudaZoneRows() = default;

  bool is_packed(Layer layer) const { return packed_[static_cast<size_t>(layer.value())]; }
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
  std::vector<bool> packed_;
  int64_t layer_elements_ = 0;  // of k, and of v
  std::vector<int64_t> at_;     // of each layer in bytes_
  cuda::PinnedBuffer<uint8_t> bytes_;
  std::vector<kernels::PackedHead> heads_;  // [layers, kv_heads]
  cuda::DeviceArena arena_;                 // of device_heads_
  kernels::PackedHead* device_heads_ = nullptr;
  std::unique_ptr<kernels::ExceptionPieces> adding_;  // until they are all there
  cuda::PinnedBuffer<kernels::RowPiece> exceptions_;
};

}  // namespace carrel::decoder
