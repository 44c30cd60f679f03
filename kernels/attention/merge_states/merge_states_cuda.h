// What:   joins partial attention over two disjoint sets of rows, on the GPU.
// Math:   lse = ln(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b;
//         weights in fp64.
// Source: the attention-state merge of FlashInfer (Ye et al. 2024, section 2.2).
// Shapes: out_a, out_b [heads, head_dim] f32; lse_a, lse_b [heads] f32. The result replaces a;
//         out_bf16 [heads, head_dim] is it rounded, or null. head_dim 1 .. 1024.
// Edge:   lse = -inf is the empty set: merging it changes no bit and its out is not read; two empty
//         sets stay empty, never NaN.
// Errors: InvalidValue for a shape that is not served. No heads: nothing is enqueued.
// Threads: reentrant.
// Cost:   one launch, which may be captured in a graph.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct MergeStatesCudaParams {
  float* out_a = nullptr;
  float* lse_a = nullptr;
  const float* out_b = nullptr;
  const float* lse_b = nullptr;
  Bf16* out_bf16 = nullptr;
  int64_t heads = 0;
  int64_t head_dim = 0;
};

cudaError_t MergeStatesCuda(const MergeStatesCudaParams& params, cudaStream_t stream);

}  // namespace carrel::kernels
