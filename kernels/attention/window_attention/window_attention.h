// What:   attention of some queries over contiguous rows of one KV head (the decoder's window): one
//         token's group of q heads, or the groups of several tokens that see the same rows.
// Math:   out[h] = sum_{j < rows} softmax_j(scale * <q[h], k[j]>) v[j];
//         lse[h] = ln sum_j exp(scale * <q[h], k[j]>)
// Shapes: q, out [group, head_dim] f32; k, v [rows, head_dim] f32 or bf16, contiguous; lse [group] f32.
// Units:  scale includes 1/sqrt(head_dim); keys are after RoPE at their absolute position; lse is a
//         natural logarithm.
// Edge:   no rows => out = 0, lse = -inf, never NaN.
// Threads: reentrant; a query's results do not depend on how many others there are.
// Cost:   reads k and v once per call (v once per 16 queries).
#pragma once

#include <cstdint>

namespace carrel::kernels {

struct WindowAttentionParams {
  const float* q = nullptr;
  int64_t group = 0;
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t rows = 0;
  int64_t head_dim = 0;
  float scale = 0;
  float* out = nullptr;
  float* lse = nullptr;
  bool bf16 = false;  // k and v; else f32
};

// scratch: group * rows floats.
void WindowAttention(const WindowAttentionParams& params, float* scratch);
void RefWindowAttention(const WindowAttentionParams& params);

}  // namespace carrel::kernels
