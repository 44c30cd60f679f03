#include <cstring>

#include "kernels/layer/quantized_linear/quantized_linear.h"
#include "kernels/reference.h"

namespace carrel::kernels {

void RefQuantizedLinear(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                        float* y, int64_t y_stride) {
  std::vector<float> row(static_cast<size_t>(w.in));
  for (int64_t o = 0; o < w.out; ++o) {
    Dequantize(w.type, w.Rows(o, o + 1).data, w.in, row.data());
    float bias = 0;
    if (w.bias != nullptr) {
      std::memcpy(&bias, static_cast<const uint8_t*>(w.bias) + o * sizeof(float), sizeof(bias));
    }
    for (int64_t i = 0; i < n; ++i) {
      y[i * y_stride + o] = static_cast<float>(bias + RefDot(x + i * x_stride, row.data(), w.in));
    }
  }
}

}  // namespace carrel::kernels
