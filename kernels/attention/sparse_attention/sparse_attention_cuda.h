// What:   attention of one token over rows chosen by index, on the GPU; no copy of them is made.
// Math:   with S_g = ids[g, 0 .. count[g]), g = h / group:
//         out[h] = sum_{j in S_g} softmax_j(scale * <q[h], k[g, j]>) v[g, j];
//         lse[h] = ln sum_{j in S_g} exp(scale * <q[h], k[g, j]>).
//         fp32 sums; weights are rounded to bf16 before they meet V.
// Source: the gather fused into attention of HATA (2025, section 4); arithmetic as
//         window_attention.
// Shapes: q [kv_heads * group, head_dim] bf16; k, v [kv_heads, row_stride, head_dim] bf16, in
//         device memory or in pinned host memory, which is read where it lies;
//         ids [kv_heads, ids_stride] int32 in 0 .. row_stride - 1, in device or pinned memory;
//         out [kv_heads * group, head_dim] f32; lse [kv_heads * group] f32. head_dim 64 or 128;
//         group 1 .. 16. q, k, v, out at multiples of 16 bytes.
// Units:  scale > 0 includes 1/sqrt(head_dim); lse is a natural logarithm.
// Edge:   no rows => out = 0, lse = -inf, never NaN. A row listed twice counts twice.
// Errors: InvalidValue for a shape that is not served; nothing is enqueued then.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads the rows once; one launch for sequences of one shape, at most kMostTogether, which may be captured
//         in a graph.
#pragma once

#include <span>

#include "kernels/decode_attention.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct SparseAttentionCudaParams {
  const Bf16* q = nullptr;
  KvView kv;
  const int32_t* ids = nullptr;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  int64_t ids_stride = 0;
  int64_t rows = 0;                    // of every KV head, if row_count is null
  const int32_t* row_count = nullptr;  // [kv_heads], in device memory, each <= ids_stride
  float scale = 0;
  float* out = nullptr;
  float* lse = nullptr;
  int64_t splits = 0;         // DecodeSplits(most rows to come, kv_heads)
  void* workspace = nullptr;  // DecodeWorkspaceBytes
};

// Of one token each of several sequences: each gets the bits that it gets alone.
cudaError_t SparseAttentionCuda(std::span<const SparseAttentionCudaParams> all,
                                cudaStream_t stream);
inline cudaError_t SparseAttentionCuda(const SparseAttentionCudaParams& params,
                                       cudaStream_t stream) {
  return SparseAttentionCuda({&params, 1}, stream);
}

}  // namespace carrel::kernels
