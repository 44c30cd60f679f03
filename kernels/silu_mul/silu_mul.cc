#include "kernels/silu_mul/silu_mul.h"
namespace carrel::kernels {

void SiluMul(float* gate, const float* up, int64_t count) { RefSiluMul(gate, up, count); }

}  // namespace carrel::kernels
