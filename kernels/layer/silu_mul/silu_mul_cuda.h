// What:   the gate of a SwiGLU block on the GPU.
// Math:   y[i, c] = half(g / (1 + exp(-g)) * u),  g = gate_up[i, c], u = gate_up[i, width + c]
// Shapes: gate_up [n, 2 width] f32, y [n, width] of `type`, contiguous device memory, 16-byte
//         aligned; width a multiple of 4.
// Edge:   n == 0 does nothing.   Errors: cudaErrorInvalidValue a width that does not fit.
// Threads: reentrant; only enqueues.
// Cost:   reads gate_up once, writes y once; fp32 inside.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/half_type.h"

namespace carrel::kernels {

cudaError_t SiluMulCuda(const float* gate_up, int64_t n, int64_t width, void* y,
                        cudaStream_t stream, HalfType type = HalfType::kBf16);

}  // namespace carrel::kernels
