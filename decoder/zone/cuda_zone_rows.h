// What:      the zone's rows in pinned memory of this host, where the GPU reads them: of each layer as
//            they are, or packed (kernels/rows/packed_rows), which takes three quarters of the bytes.
// Shapes:    of a layer as it is: k, v [kv_heads, rows, head_dim] bf16; packed: [kv_heads, rows,
//            PackedRowBytes(head_dim)].
// Ownership: keeps neither client nor source; `heads` outlive this.
// Errors:    ResourceExhausted pinned memory; those of the store.
// Threads:   any, once made.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/select/host_rows.h"
#include "kernels/kv_view.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"

namespace carrel::retrieval {
class Session;
}

namespace carrel::decoder {

class CudaZoneRows {
 public:
  // packed: [layers]; heads: device memory, [layers, kv_heads]. Copies the zone from `source` if it is
  // given, otherwise reads it from the store.
  static absl::StatusOr<CudaZoneRows> Create(const AttentionShape& shape, RowRange zone,
                                             std::vector<bool> packed, int64_t max_fetch_rows,
                                             retrieval::Session* client, const HostRows* source,
                                             ThreadPool* pool, kernels::PackedHead* heads);
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
  absl::Status ReadFrom(retrieval::Session* client, int64_t max_fetch_rows, ThreadPool* pool);
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
  kernels::PackedHead* device_heads_ = nullptr;
  std::unique_ptr<kernels::ExceptionPieces> adding_;  // until they are all there
  cuda::PinnedBuffer<kernels::RowPiece> exceptions_;
};

}  // namespace carrel::decoder
