#include "kernels/linear/linear.h"

#include <cblas.h>

#include <algorithm>

namespace carrel::kernels {

WeightMatrix WeightMatrix::Rows(int64_t begin, int64_t end) const {
  WeightMatrix part = *this;
  part.data = static_cast<const uint8_t*>(data) + begin * in * DTypeBytes(dtype);
  part.out = end - begin;
  if (bias != nullptr) part.bias = static_cast<const uint8_t*>(bias) + begin * DTypeBytes(dtype);
  return part;
}

namespace {
constexpr int64_t kPanelRows = 128;
}

int64_t LinearScratchFloats(const WeightMatrix& w) {
  return std::min(w.out, kPanelRows) * (w.in + 1);
}

void Linear(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
            int64_t y_stride, float* scratch) {
  if (n == 0) return;
  static const bool once = (openblas_set_num_threads(1), true);
  (void)once;
  const int64_t panel = std::min(w.out, kPanelRows);
  float* bias = scratch + panel * w.in;
  for (int64_t o = 0; o < w.out; o += kPanelRows) {
    const WeightMatrix part = w.Rows(o, std::min(w.out, o + kPanelRows));
    WidenToFloat(part.dtype, part.data, part.out * part.in, scratch);
    if (part.bias != nullptr) WidenToFloat(part.dtype, part.bias, part.out, bias);
    for (int64_t i = 0; i < n; i += kLinearTokenTile) {
      const int64_t m = std::min(kLinearTokenTile, n - i);
      float* out = y + i * y_stride + o;
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, part.out, part.in, 1.0f,
                  x + i * x_stride, x_stride, scratch, part.in, 0.0f, out, y_stride);
      if (part.bias == nullptr) continue;
      for (int64_t r = 0; r < m; ++r) {
        for (int64_t c = 0; c < part.out; ++c) out[r * y_stride + c] += bias[c];
      }
    }
  }
}

}  // namespace carrel::kernels
