#include <cmath>

#include "kernels/layer/rms_norm/rms_norm.h"

namespace carrel::kernels {

void RefRmsNorm(const float* x, int64_t n, int64_t dim, int64_t x_stride, const float* w, float eps,
                float* y, int64_t y_stride) {
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0;
    for (int64_t c = 0; c < dim; ++c) sum += double{x[i * x_stride + c]} * x[i * x_stride + c];
    const double factor = 1.0 / std::sqrt(sum / static_cast<double>(dim) + double{eps});
    for (int64_t c = 0; c < dim; ++c) {
      y[i * y_stride + c] = static_cast<float>(double{x[i * x_stride + c]} * factor * double{w[c]});
    }
  }
}

}  // namespace carrel::kernels
