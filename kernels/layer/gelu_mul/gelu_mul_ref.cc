#include <cmath>

#include "kernels/layer/gelu_mul/gelu_mul.h"

namespace carrel::kernels {

void RefGeluMul(float* gate, const float* up, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const double g = gate[i], u = std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
    gate[i] = static_cast<float>(g / (1.0 + std::exp(-2 * u)) * double{up[i]});
  }
}

}  // namespace carrel::kernels
