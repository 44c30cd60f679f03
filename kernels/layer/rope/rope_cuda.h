// What:   finishes fresh queries, keys and values on the GPU in one pass: bias, per-head norm,
//         rotary position embedding, and placement of keys and values among a layer's rows.
// Math:   with x = qkv + bias, for q and k, if norms are given, x <- rms_norm(x of a head), then
//         x <- scale x, and for q, if a drift is given, x <- x + drift: q and k as rope.h; v as it is.
// Source: as rope.h; the per-head norm is that of Qwen3 checkpoints.
// Shapes: qkv [n, (q_heads + 2 kv_heads) * head_dim] f32: all q heads, then k, then v; bias f32 of
//         one row or null; q_norm, k_norm [head_dim] f32 or null; drift [q_heads, head_dim] f32 or
//         null; inv_freq [head_dim / 2] f32, or null: RoPE is left out. q [n, q_heads, head_dim] bf16;
//         q_exact the same before rounding, f32, or null; of which token i becomes row
//         q_exact_rows[i] (int32), none if that is below 0, and row i if q_exact_rows is null. kv
//         [kv_heads, row_stride, head_dim] bf16; token i becomes row first_row + i. Null: the queries
//         alone, and qkv has q heads only.
// Units:  token i stands at first_position + i; *step, if given, is added to first_position and
//         first_row when the kernel runs, so that a captured graph can be replayed. rows, if given, says
//         instead of them, and of kv, where each token stands and its k and v go.
// Edge:   n == 0 does nothing.   Errors: cudaErrorInvalidValue an odd head_dim or one over 256.
// Threads: reentrant; only enqueues. A token's result does not depend on n.
// Cost:   reads qkv once, writes q, k, v once; the angles are computed once per token.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

// A token of a sequence of its own.
struct RopeCudaRow {
  int64_t position = 0;
  int64_t row = 0;
  KvRows kv;                 // of layer 0
  int64_t layer_stride = 0;  // in rows, from one layer's k to the next's, and from v to v
};

struct RopeCudaParams {
  const float* qkv = nullptr;
  const float* bias = nullptr;
  const float* q_norm = nullptr;
  const float* k_norm = nullptr;
  float eps = 0;
  float scale = 1;
  const float* drift = nullptr;
  const float* inv_freq = nullptr;
  int64_t n = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int64_t first_position = 0;
  int64_t first_row = 0;
  const int32_t* step = nullptr;
  Bf16* q = nullptr;
  float* q_exact = nullptr;
  const int32_t* q_exact_rows = nullptr;
  KvRows kv;
  const RopeCudaRow* rows = nullptr;  // device, [n]
  int32_t layer = 0;                  // where there are rows
};

cudaError_t RopeCuda(const RopeCudaParams& params, cudaStream_t stream);

}  // namespace carrel::kernels
