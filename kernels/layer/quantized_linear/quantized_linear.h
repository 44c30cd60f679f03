// What:   y = x W^T + b for the quantised rows of a GGUF tensor, mapped as they are.
// Math:   y[i, o] = sum_c x[i, c] * w[o, c] + bias[o], w[o, c] as kernels/layer/dequantize has it.
//         A type of HasBlockProducts: x is rounded to 16 bits with a scale per 32 numbers (each off
//         by at most 2^-16 of the largest of them; Q6_K 15 bits and 2^-15), products of integers add
//         up exactly within 32 columns, these in fp32: y is off by some 2e-5 of itself (Q6_K 4e-5).
//         Other types, and machines without AVX2: w is widened to fp32, and all is fp32. With AMX
//         see below.
// Shapes: x [n, in] f32, y [n, out] f32 (row strides in elements); w [out, in / block] blocks, rows
//         without gaps, at any byte address; in a multiple of the type's block; bias [out] f32 at
//         any byte address, or null.
// Edge:   n == 0 does nothing. 32 numbers of x of which one is infinite or NaN give NaN; 32 numbers
//         that are all below 1e-30 may count as zero.
// Threads: reentrant. Splitting n at multiples of kLinearTokenTile changes no bit of y. A token has
//         the bits that it has alone, wherever n and `out` are split, among QuantizedTokensAlike(w).
// Cost:   one to four tokens: reads w once (AVX2: for every two), for one at memory speed. More: makes
//         panels of 16-bit words of w, in some 0.06 ns a number, and multiplies all tokens with them
//         (decision 076), twice as fast as fp32; with AMX of bytes but for Q6_K, with the same bits. A
//         token is packed in some 0.4 ns per number (PackTokens). With AMX whole tiles of
//         kLinearTokenTile tokens are multiplied in parts of bf16 (linear/split_gemm.h has the error).
//         Where rows are widened, kQuantizedGemmTokens and more are, too, or go in panels to OpenBLAS
//         sgemm (one thread).
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/layer/dequantize/dequantize.h"

namespace carrel::kernels {

// Where rows are widened, from here on tokens go to AMX or to OpenBLAS.
inline constexpr int64_t kQuantizedGemmTokens = 32;
// From here on those of HasBlockProducts meet panels of so many rows (or half as many) at a time: fewer
// meet a row as it lies sooner than a panel is filled.
inline constexpr int64_t kQuantizedPanelTokens = 5;
inline constexpr int64_t kQuantizedPanelRows = 32;
inline constexpr int64_t kAnyTokens = std::numeric_limits<int64_t>::max();

struct QuantizedMatrix {
  const void* data = nullptr;
  GgufType type = GgufType::kQ8_0;
  int64_t out = 0;
  int64_t in = 0;
  const void* bias = nullptr;

  // Rows [begin, end) of the matrix.
  QuantizedMatrix Rows(int64_t begin, int64_t end) const;
};

// Whether products of few tokens are taken with the blocks as they lie, on machines with AVX2: every
// quantised type but Q2_K and Q3_K, of which four rows at a time are widened.
bool HasBlockProducts(GgufType type);

// Tokens that have the bits that each has alone: where a type HasBlockProducts, on machines with AVX2,
// kAnyTokens, with AMX kLinearTokenTile - 1; else kQuantizedGemmTokens - 1.
int64_t QuantizedTokensAlike(const QuantizedMatrix& w);

// What calls with the same tokens for parts of `out` can share: the tokens as products need them, in
// PackedTokensFloats(w, n) floats, as many for each, for any rows of w. None, and nothing is done,
// where nothing is to be prepared. Tokens may be packed a few tiles of kLinearTokenTile at a time.
int64_t PackedTokensFloats(const QuantizedMatrix& w, int64_t n);
void PackTokens(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                float* packed);

// packed: x by PackTokens, or null: then the call packs.
// scratch: QuantizedLinearScratchFloats(w) floats of the calling thread; not read before written.
int64_t QuantizedLinearScratchFloats(const QuantizedMatrix& w);
void QuantizedLinear(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                     float* y, int64_t y_stride, float* scratch, const float* packed = nullptr);

// Dequantize in vectors: equal numbers, ten times as fast.
void Widen(GgufType type, const void* blocks, int64_t count, float* out);

void RefQuantizedLinear(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                        float* y, int64_t y_stride);

}  // namespace carrel::kernels
