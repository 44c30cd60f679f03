// What:   causal attention of blocks of tokens over rows that each block and KV head chose, on the GPU:
//         what sparse prefill does once rows are chosen (kernels/select/block_prune).
// Math:   a block attends to its sink, its chosen rows, its window and itself (kernels/block_layout.h),
//         T rows in the order of the document, the r-th at rank r; its token i, q head h to those of
//         ranks below T - tokens + i + 1:
//         out[i, h] = sum_r softmax_r(scale * <q[i, h], k[r]>) v[r].
//         With a table of L positions, row and query of rank r are turned by max(0, r - max(0, T - L)),
//         each rounded to bf16 (StreamingLLM-style positions; what would be further away than L stands
//         at the far end, as decoder/zone/repositioned_attention.h has it); token i is of rank
//         T - tokens + i.
// Source: prefill/sparse_attention.h; FlashAttention-2 with mma.sync (kernels/flash_tile-inl.cuh).
// Shapes: q, out [layout.n, kv_heads * group, head_dim] bf16; out_exact the same before rounding, f32,
//         or null; k, v [kv_heads, row_stride, head_dim] bf16; chosen: rows of the zone of each
//         unit. head_dim 64 or 128; rows at multiples of 16 bytes; memory of the device, or pinned.
// Units:  scale includes 1/sqrt(head_dim). Without a table keys are after RoPE.
// Edge:   nothing chosen: the rest is attended. n == 0 does nothing.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant; only enqueues.
// Cost:   4 * block_q * group * T * head_dim flops a unit. Rows are gathered once per 64 to 192 queries
//         (tokens of a block times q heads of a KV head), the next 64 while 64 are multiplied.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/block_layout.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct BlockSparseAttentionParams {
  BlockLayout layout = {};
  const Bf16* q = nullptr;
  KvView kv;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  ChosenRows chosen = {};
  TurnTable table = {};
  float scale = 0;
  Bf16* out = nullptr;
  float* out_exact = nullptr;
};

cudaError_t BlockSparseAttention(const BlockSparseAttentionParams& params, cudaStream_t stream);
// One token of one KV head, on host memory: out [group, head_dim].
void RefBlockSparseAttention(const BlockSparseAttentionParams& params, int64_t token,
                             int64_t kv_head, float* out);

}  // namespace carrel::kernels
