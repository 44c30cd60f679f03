// What:   rows of a table by their index, as fp32, on the GPU: embeddings by token id, hidden
//         states by position.
// Math:   y[i, c] = x[rows[i], c]: fp32 bit for bit, 16-bit floats widened.
// Shapes: x [_, width] f32, or of `type`, whose width is a multiple of 2; rows [n] int32; y [n,
//         width] f32. Contiguous device memory; y overlaps nothing.
// Edge:   n == 0 does nothing. Rows may repeat; they are in range: the caller has checked them.
// Errors: cudaErrorInvalidValue a shape that does not fit.   Threads: reentrant; only enqueues.
// Cost:   one launch, a block per row; fp32 in pieces of 16 bytes where width and addresses allow.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/half_type.h"

namespace carrel::kernels {

cudaError_t GatherRowsCuda(const float* x, const int32_t* rows, int64_t n, int64_t width, float* y,
                           cudaStream_t stream);
cudaError_t GatherHalfRowsCuda(const void* x, const int32_t* rows, int64_t n, int64_t width,
                               float* y, cudaStream_t stream, HalfType type = HalfType::kBf16);
void RefGatherRows(const float* x, const int32_t* rows, int64_t n, int64_t width, float* y);
// bf16.
void RefGatherHalfRows(const uint16_t* x, const int32_t* rows, int64_t n, int64_t width, float* y);

}  // namespace carrel::kernels
