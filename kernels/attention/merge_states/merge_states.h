// What:   joins partial attention over disjoint sets of rows.
// Math:   lse = ln(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
// Source: the attention-state merge of FlashInfer (Ye et al. 2024, section 2.2); exact, associative
//         up to rounding.
// Shapes: out_a, out_b [heads, head_dim] f32; lse_a, lse_b [heads] f32. The result replaces a.
// Edge:   lse = -inf is the empty set: merging it changes no bit and its out is not read; two empty
//         sets stay empty, never NaN.
// Threads: reentrant.
#pragma once

#include <cstdint>

namespace carrel::kernels {

void MergeStates(float* out_a, float* lse_a, const float* out_b, const float* lse_b, int64_t heads,
                 int64_t head_dim);
void RefMergeStates(float* out_a, float* lse_a, const float* out_b, const float* lse_b,
                    int64_t heads, int64_t head_dim);

}  // namespace carrel::kernels
