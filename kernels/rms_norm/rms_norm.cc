#include "kernels/rms_norm/rms_norm.h"
namespace carrel::kernels {

void RmsNorm(const float* x, int64_t n, int64_t dim, int64_t x_stride, const float* w, float eps,
             float* y, int64_t y_stride) {
  RefRmsNorm(x, n, dim, x_stride, w, eps, y, y_stride);
}

}  // namespace carrel::kernels
