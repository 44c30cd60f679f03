// What:      the rows that a decoder on the GPU itself holds: sink and local of the context, then
//            everything prompted and generated since.
// Shapes:    of each layer k, v [kv_heads, capacity, head_dim] bf16, device memory.
// Edge:      the order of rows does not matter to attention: keys carry their position (RoPE).
// Errors:    ResourceExhausted device memory.
// Threads:   one.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "common/ids.h"
#include "kernels/kv_view.h"

namespace carrel::decoder {

class CudaWindow {
 public:
  static int64_t Bytes(const AttentionShape& shape, int64_t capacity) {
    return Elements(shape, capacity) * int64_t{sizeof(kernels::Bf16)};
  }
  static absl::StatusOr<CudaWindow> Create(const AttentionShape& shape, int64_t capacity);
  CudaWindow() = default;

  // Rows of the context, [rows, head_dim] bf16 on the host, unaligned, to row `at` of the head.
  // Waits.
  absl::Status CopyRows(Layer layer, KvHead head, int64_t at, int64_t rows, const void* k,
                        const void* v);

  kernels::KvRows kv(Layer layer) const {
    kernels::Bf16* const k = rows_.data() + 2 * layer.value() * layer_elements_;
    return {k, k + layer_elements_, capacity_};
  }
  // In rows, from one layer's k to the next's, and from v to v.
  int64_t layer_stride() const { return 2 * int64_t{shape_.kv_heads} * capacity_; }
  int64_t bytes() const { return rows_.bytes(); }

 private:
  static int64_t Elements(const AttentionShape& shape, int64_t capacity) {
    return int64_t{shape.layers} * 2 * shape.kv_heads * capacity * shape.head_dim;
  }

  AttentionShape shape_;
  int64_t capacity_ = 0;
  int64_t layer_elements_ = 0;  // of k, and of v
  cuda::DeviceBuffer<uint16_t> rows_;
};

}  // namespace carrel::decoder
