// What:   attention of one token over rows that lie together, on the GPU: the decoder's window, or
//         all rows of a context.
// Math:   out[h] = sum_{j < rows} softmax_j(scale * <q[h], k[g, j]>) v[g, j], g = h / group;
//         lse[h] = ln sum_j exp(scale * <q[h], k[g, j]>). fp32 sums; weights are rounded to bf16
//         before they meet V.
// Source: split over the sequence as in FlashDecoding (Dao et al. 2023) and joined as in FlashInfer
//         (Ye et al. 2024, 2.2); ours: rows pass from memory to the tensor cores through registers.
// Shapes: q [kv_heads * group, head_dim] bf16; k, v [kv_heads, row_stride, head_dim] bf16, of which
//         the first `rows` count; out [kv_heads * group, head_dim] f32; lse [kv_heads * group] f32.
//         head_dim 64 or 128; group 1 .. 16. q, k, v, out at multiples of 16 bytes.
// Units:  scale > 0 includes 1/sqrt(head_dim); lse is a natural logarithm.
// Edge:   no rows => out = 0, lse = -inf, never NaN.
// Errors: InvalidValue for a shape that is not served; nothing is enqueued then.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads the rows once; one launch for sequences of one shape, at most kMostTogether, which may be captured
//         in a graph.
#pragma once

#include <span>

#include "kernels/decode_attention.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct WindowAttentionCudaParams {
  const Bf16* q = nullptr;
  KvView kv;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  int64_t rows = 0;  // if row_count is null
  // In device memory, read when the kernel runs: a captured launch serves a window that grows, up
  // to kv.row_stride rows.
  const int32_t* row_count = nullptr;
  float scale = 0;
  float* out = nullptr;
  float* lse = nullptr;
  int64_t splits = 0;         // DecodeSplits(most rows to come, kv_heads)
  void* workspace = nullptr;  // DecodeWorkspaceBytes
};

// Of one token each of several sequences: each gets the bits that it gets alone.
cudaError_t WindowAttentionCuda(std::span<const WindowAttentionCudaParams> all,
                                cudaStream_t stream);
inline cudaError_t WindowAttentionCuda(const WindowAttentionCudaParams& params,
                                       cudaStream_t stream) {
  return WindowAttentionCuda({&params, 1}, stream);
}

}  // namespace carrel::kernels
