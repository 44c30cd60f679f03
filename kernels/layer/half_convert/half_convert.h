// What:   bf16 values as f16, for the product of attention with f16 weights.
// Math:   y[i] = f16(x[i]): exact from 2^-14 to 65,504; smaller ones are rounded, larger ones
//         become 65,504, NaN stays.
// Shapes: x, y [count], device memory, 4-byte aligned; count even.
// Edge:   count == 0 does nothing.   Errors: cudaErrorInvalidValue an odd count.
// Threads: reentrant; only enqueues.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

cudaError_t Bf16ToF16Cuda(const void* x, int64_t count, void* y, cudaStream_t stream);

}  // namespace carrel::kernels
