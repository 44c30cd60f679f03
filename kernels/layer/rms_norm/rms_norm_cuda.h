// What:   root-mean-square normalisation of each row on the GPU, rounded to bf16 or f16 for the
//         product that follows.
// Math:   y[i, c] = half(x[i, c] / sqrt(mean_c(x[i, c]^2) + eps) * w[c])
// Source: as rms_norm.h.
// Shapes: x [n, dim] f32, y [n, dim] of `type`, contiguous; w [dim] f32. Device memory, 16-byte
//         aligned; dim a multiple of 4.
// Edge:   n == 0 does nothing.   Errors: cudaErrorInvalidValue a dim that does not fit.
// Threads: reentrant; only enqueues. A row's result does not depend on n.
// Cost:   reads x once from memory and once from cache, writes y once.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/half_type.h"

namespace carrel::kernels {

cudaError_t RmsNormCuda(const float* x, int64_t n, int64_t dim, const float* w, float eps, void* y,
                        cudaStream_t stream, HalfType type = HalfType::kBf16);

}  // namespace carrel::kernels
