#include <cmath>

#include "kernels/layer/silu_mul/silu_mul.h"

namespace carrel::kernels {

void RefSiluMul(float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const double g = gate[i];
    gate[i] = static_cast<float>(g / (1.0 + std::exp(-g)) * double{up[i]});
  }
}

}  // namespace carrel::kernels
