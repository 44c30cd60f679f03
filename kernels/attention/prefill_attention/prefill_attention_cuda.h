// What:   causal attention of a chunk of new tokens over all earlier keys and themselves, all
//         heads, on the GPU; exact, blocked over keys (online softmax).
// Math:   token i sees keys j < min(rows, first_position + i + 1):
//         out[i, h] = sum_j softmax_j(scale * <q[i, h], k[g, j]>) v[g, j],
//         g = h / (q_heads / kv_heads);  lse[i, h] = ln sum_j exp(scale * <q[i, h], k[g, j]>)
// Source: FlashAttention-2 (Dao 2023, algorithm 1) with mma.sync; FlashAttention-3 (Shah et al.
//         2024, section 3: warp specialisation, ping-pong of two warpgroups, the next QK^T in
//         flight beside PV) with wgmma and TMA. Of few tokens over many rows: split over the keys as in
//         FlashDecoding (Dao et al. 2023), its parts joined as in FlashInfer (Ye et al. 2024, 2.2).
// Shapes: q, out [n, q_heads, head_dim] bf16 contiguous; out_exact the same before rounding, f32;
//         either of the two may be null; k, v [kv_heads, row_stride, head_dim] bf16, of which the
//         first `rows` count; lse [n, q_heads] f32 or null; room, if not null,
//         PrefillAttentionRoom(n, rows, q_heads, head_dim) floats. Device memory, 16-byte aligned.
// Units:  scale includes 1/sqrt(head_dim); keys are after RoPE; lse is a natural logarithm.
// Edge:   n == 0 does nothing. A token that sees no key: out = 0, lse = -inf. first_position >=
//         rows: no mask, every token sees every key. Keys past the rows that a token sees are never
//         multiplied; rows at and past `rows` are never read.
// Errors: cudaErrorInvalidValue a head_dim that no variant has (16, 32, 64, 96, 128 have one).
// Threads: reentrant, each call with a room of its own; only enqueues.
// Bits:   those of a token depend on n, rows and q_heads, and on whether there is a room.
// Cost:   4 * n * keys * head_dim flops a head; K and V are read once per 64 or 128 tokens and
//         head, from L2 but for the first reader. Without a room 64 tokens of a head are one block's,
//         however many rows there are: few tokens leave most of the chip idle.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct PrefillAttentionCudaParams {
  const Bf16* q = nullptr;
  KvView kv;
  int64_t n = 0;
  int64_t first_position = 0;
  int64_t rows = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  float scale = 0;
  Bf16* out = nullptr;
  float* out_exact = nullptr;
  float* lse = nullptr;
  float* room = nullptr;
};

// Parts that the keys of n tokens are cut into where there is a room; 1 .. kMaxPrefillParts, and 1
// where n tokens fill a chip.
inline constexpr int64_t kMaxPrefillParts = 32;
int64_t PrefillAttentionParts(int64_t n, int64_t rows, int32_t q_heads);
// Floats of room; 0: none is needed.
int64_t PrefillAttentionRoom(int64_t n, int64_t rows, int32_t q_heads, int32_t head_dim);
// For up to `most` tokens over any number of rows.
int64_t MostPrefillAttentionRoom(int64_t most, int32_t q_heads, int32_t head_dim);

// kWgmma: compute capability 9.0, head_dim 64 or 128. kMma: 8.0 and later.
enum class PrefillAttentionVariant { kAuto, kMma, kWgmma };

bool PrefillAttentionHas(PrefillAttentionVariant variant, int32_t head_dim);

cudaError_t PrefillAttentionCuda(const PrefillAttentionCudaParams& params, cudaStream_t stream,
                                 PrefillAttentionVariant variant = PrefillAttentionVariant::kAuto);

// One token, on host memory: out [q_heads, head_dim], lse [q_heads].
void RefPrefillAttentionCuda(const PrefillAttentionCudaParams& params, int64_t token, float* out,
                             float* lse);

}  // namespace carrel::kernels
