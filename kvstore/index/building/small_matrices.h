// What:   small dense matrices, row-major f32, for what index builders learn from samples of keys
//         and queries.
// Threads: reentrant. RandomRotation keeps what it made.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/layer/linear/linear.h"
#include "kvstore/index/rows/rows.h"

namespace carrel::kvstore {

using Floats = std::vector<float>;

// Makes rows [count, dim] orthonormal, in order, by Gram and Schmidt. A row of which nothing is
// left stays as small as it is.
void Orthonormalise(std::vector<double>& rows, int64_t count, int64_t dim);

// A random rotation, [count, dim] of its rows; the same in every build.
Floats RandomRotation(int64_t count, int64_t dim, int64_t seed);

class Multiply {
 public:
  // y [n, w.out] = x [n, w.in] w^T
  void operator()(const float* x, int64_t n, const kernels::WeightMatrix& w, float* y) {
    scratch_.resize(static_cast<size_t>(kernels::LinearScratchFloats(w)));
    kernels::Linear(x, n, w.in, w, y, w.out, scratch_.data());
  }
  Floats operator()(const Floats& x, int64_t n, const Floats& w, int64_t out) {
    Floats y(static_cast<size_t>(n * out));
    (*this)(x.data(), n, {w.data(), DType::kF32, out, static_cast<int64_t>(x.size()) / n},
            y.data());
    return y;
  }

 private:
  Floats scratch_;
};

Floats Transposed(const Floats& x, int64_t rows, int64_t columns);  // [columns, rows]

// Solves A X = B in place of B, for a symmetric positive definite A [n, n]; B [n, columns].
void SolveCholesky(std::vector<double>& a, int64_t n, std::vector<double>& b, int64_t columns);

// Rows of x [n, d] -= from [d].
void SubtractFromRows(const float* from, int64_t n, int64_t d, float* x);
Floats MeanOf(const Floats& x, int64_t n, int64_t d);  // [d]

// At most `wanted` keys, evenly spread, as f32.
Floats SpreadKeys(const Rows& keys, int64_t wanted);

}  // namespace carrel::kvstore
