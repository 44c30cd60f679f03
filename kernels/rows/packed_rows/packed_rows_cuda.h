// What:   rows of packed_rows.h chosen by index and unpacked into device memory, by the GPU.
// Math:   k[g, i], v[g, i] = the K and V of row ids[g, i], bit for bit.
// Shapes: packed rows [kv_heads, row_stride, PackedRowBytes(head_dim)] and exceptions, both in pinned
//         host memory or on the device, at multiples of 16 bytes; heads [kv_heads] on the device; ids
//         [kv_heads, ids_stride] int32 in 0 .. row_stride - 1, of which the first `count` matter; to
//         [kv_heads, to.row_stride, head_dim] bf16, device memory. head_dim 64 or 128.
// Edge:   count == 0: nothing is enqueued. Rows may repeat.
// Errors: InvalidValue for a shape that is not served.   Threads: reentrant; only enqueues.
// Cost:   one launch for up to kMostTogether of one shape, which may be captured in a graph; 12 bits of each element at the bus's speed.
#pragma once

#include <span>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"
#include "kernels/rows/packed_rows/packed_rows.h"

namespace carrel::kernels {

struct PackedRows {
  const uint8_t* rows = nullptr;
  const PackedHead* heads = nullptr;
  const RowPiece* exceptions = nullptr;
  int64_t row_stride = 0;  // rows from one KV head to the next
};

struct GatherPackedRowsParams {
  PackedRows packed;
  const int32_t* ids = nullptr;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ids_stride = 0;
  int64_t count = 0;  // of each KV head
  KvRows to;
};

// For several sequences.
cudaError_t GatherPackedRowsCuda(std::span<const GatherPackedRowsParams> all, cudaStream_t stream);
inline cudaError_t GatherPackedRowsCuda(const GatherPackedRowsParams& params, cudaStream_t stream) {
  return GatherPackedRowsCuda({&params, 1}, stream);
}

}  // namespace carrel::kernels
