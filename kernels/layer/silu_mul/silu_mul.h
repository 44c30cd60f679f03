// What:   the gate of a SwiGLU block.
// Math:   gate[i] <- gate[i] / (1 + exp(-gate[i])) * up[i]
// Shapes: gate, up [count] f32.
// Units:  relative error of exp <= 2e-7 in the SIMD version.
// Edge:   a gate below -88 gives 0 (the exact value is under 1e-36).
// Threads: reentrant.
#pragma once

#include <cstdint>

namespace carrel::kernels {

void SiluMul(float* gate, const float* up, int64_t count);
void RefSiluMul(float* gate, const float* up, int64_t count);

}  // namespace carrel::kernels
