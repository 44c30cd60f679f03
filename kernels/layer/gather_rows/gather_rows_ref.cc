#include <cstring>

#include "common/bf16.h"
#include "kernels/layer/gather_rows/gather_rows_cuda.h"

namespace carrel::kernels {

void RefGatherRows(const float* x, const int32_t* rows, int64_t n, int64_t width, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(y + i * width, x + rows[i] * width, static_cast<size_t>(width) * sizeof(float));
  }
}

void RefGatherHalfRows(const uint16_t* x, const int32_t* rows, int64_t n, int64_t width, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < width; ++c) y[i * width + c] = Bf16ToFloat(x[rows[i] * width + c]);
  }
}

}  // namespace carrel::kernels
