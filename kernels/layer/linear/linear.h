// What:   y = x W^T + b for weights that stay in the checkpoint's dtype, mapped and unaligned; sums
//         of outer products of rows.
// Math:   y[i, o] = sum_c x[i, c] * w[o, c] + bias[o], fp32 products and sums; each weight is
//         widened exactly.  AddOuterProducts: sums[i, j] += sum_r a[r, i] * b[r, j], fp32.
// Shapes: x [n, in] f32, y [n, out] f32 (row strides in elements); w [out, in] f32 | f16 | bf16
//         row-major; bias [out] of the same dtype or null.  a [rows, m], b [rows, n], sums [m, n]
//         f32 without gaps.
// Edge:   n == 0, or rows == 0, does nothing.
// Threads: reentrant. Splitting n at multiples of kLinearTokenTile, or `out` anywhere for n <
//         kLinearGemmTokens, changes no bit of y.
// Cost:   n < kLinearGemmTokens: reads w once at memory speed (GEMV); otherwise widens w in panels
//         and calls OpenBLAS sgemm (one thread), or with AMX, where w is bf16, multiplies x in three
//         parts of bf16 (split_gemm.h), as precisely.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace carrel::kernels {

inline constexpr int64_t kLinearTokenTile = 64;
inline constexpr int64_t kLinearGemmTokens = 8;

struct WeightMatrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t out = 0;
  int64_t in = 0;
  const void* bias = nullptr;

  // Rows [begin, end) of the matrix.
  WeightMatrix Rows(int64_t begin, int64_t end) const;
};

// scratch: LinearScratchFloats(w) floats of the calling thread; not read before written.
int64_t LinearScratchFloats(const WeightMatrix& w);
void Linear(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
            int64_t y_stride, float* scratch);

void RefLinear(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
               int64_t y_stride);

// The GEMM alone: y = (accumulate ? y : 0) + x panel^T for rows [out, in] that are fp32 already, a tile
// of tokens at a time. For those who widen weights of another kind.
void MultiplyPanel(const float* x, int64_t n, int64_t x_stride, const float* panel, int64_t out,
                   int64_t in, bool accumulate, float* y, int64_t y_stride);

void AddOuterProducts(const float* a, int64_t m, const float* b, int64_t n, int64_t rows,
                      float* sums);
void RefAddOuterProducts(const float* a, int64_t m, const float* b, int64_t n, int64_t rows,
                         float* sums);

}  // namespace carrel::kernels
