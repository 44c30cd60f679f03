// What:   y = x W^T for many tokens on AMX's tiles of bf16, with nearly the precision of f32: what
//         linear and quantized_linear do with panels of widened rows where AmxUsed().
// Math:   W bf16: x in three parts of bf16, a product as in f32. Else x and W in two parts each, and a
//         product is off by some 4e-6 of itself, at random, where f32 has 1e-7. Sums in f32
//         (kernels/amx_tiles-inl.h, decision 046).
// Shapes: x [n, in] f32, y [n, out] f32 (row strides in elements). widen(begin, end, rows): rows
//         [begin, end) of W, at most kSplitWidenRows, as f32 [end - begin, in]; bf16: they were bf16,
//         so that one part is all of them.
// Edge:   n == 0 does nothing. A token or a row of W with an infinity gives NaN.
// Threads: reentrant. Splitting n anywhere changes no bit of y, nor does splitting `out`.
// Cost:   3 n out in multiply-adds of bf16; W is widened and packed once per kSplitTokens tokens.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"

namespace carrel::kernels {

inline constexpr int64_t kSplitTokens = 256;
inline constexpr int64_t kSplitWidenRows = 16;

int64_t SplitGemmScratchFloats(int64_t in);

// scratch: SplitGemmScratchFloats(in) floats of the calling thread; not read before written.
void SplitGemm(const float* x, int64_t n, int64_t x_stride, int64_t out, int64_t in, bool bf16,
               absl::FunctionRef<void(int64_t begin, int64_t end, float* rows)> widen, float* y,
               int64_t y_stride, float* scratch);

}  // namespace carrel::kernels
