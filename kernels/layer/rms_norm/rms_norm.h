// What:   root-mean-square normalisation of each row.
// Math:   y[i, c] = x[i, c] / sqrt(mean_c(x[i, c]^2) + eps) * w[c]
// Source: Zhang and Sennrich 2019, equation 4; rounding order as in Hugging Face transformers
//         (normalise, then scale), all in fp32.
// Shapes: x, y [n, dim] f32, row strides in elements; w [dim] f32. y may be x.
// Threads: reentrant; a row's result does not depend on n.
#pragma once

#include <cstdint>

namespace carrel::kernels {

void RmsNorm(const float* x, int64_t n, int64_t dim, int64_t x_stride, const float* w, float eps,
             float* y, int64_t y_stride);
void RefRmsNorm(const float* x, int64_t n, int64_t dim, int64_t x_stride, const float* w, float eps,
                float* y, int64_t y_stride);

}  // namespace carrel::kernels
