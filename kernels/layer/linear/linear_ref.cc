#include "kernels/layer/linear/linear.h"
namespace carrel::kernels {

namespace {

double Element(const void* data, DType dtype, int64_t index) {
  float value;
  WidenToFloat(dtype, static_cast<const uint8_t*>(data) + index * DTypeBytes(dtype), 1, &value);
  return value;
}

}  // namespace

void RefLinear(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
               int64_t y_stride) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t o = 0; o < w.out; ++o) {
      double sum = 0;
      for (int64_t c = 0; c < w.in; ++c) {
        sum += double{x[i * x_stride + c]} * Element(w.data, w.dtype, o * w.in + c);
      }
      if (w.bias != nullptr) sum += Element(w.bias, w.dtype, o);
      y[i * y_stride + o] = static_cast<float>(sum);
    }
  }
}

void RefAddOuterProducts(const float* a, int64_t m, const float* b, int64_t n, int64_t rows,
                         float* sums) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = sums[i * n + j];
      for (int64_t r = 0; r < rows; ++r) sum += double{a[r * m + i]} * b[r * n + j];
      sums[i * n + j] = static_cast<float>(sum);
    }
  }
}

}  // namespace carrel::kernels
