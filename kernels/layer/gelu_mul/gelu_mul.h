// What:   the gate of a GeGLU block, GELU by its tanh approximation.
// Math:   gate[i] <- gate[i] / 2 (1 + tanh(u)) * up[i],  u = sqrt(2 / pi) (g + 0.044715 g^3);
//         computed as g / (1 + exp(-2 u)), which is the same.
// Source: Hendrycks and Gimpel, "Gaussian error linear units", section 2; "gelu_pytorch_tanh" of
//         Hugging Face configurations.
// Shapes: gate, up [count] f32.
// Units:  relative error of exp <= 2e-7 in the SIMD version.
// Edge:   a gate below -10 gives 0 (the exact value is under 1e-36).
// Threads: reentrant.
#pragma once

#include <cstdint>

namespace carrel::kernels {

void GeluMul(float* gate, const float* up, int64_t count);
void RefGeluMul(float* gate, const float* up, int64_t count);

}  // namespace carrel::kernels
