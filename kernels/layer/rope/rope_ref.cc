#include <cmath>

#include "kernels/layer/rope/rope.h"

namespace carrel::kernels {

void RefRope(float* x, int64_t n, int64_t heads, int64_t head_dim, int64_t first_position,
             const float* inv_freq) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      float* row = x + (i * heads + h) * head_dim;
      for (int64_t c = 0; c < half; ++c) {
        const float angle = static_cast<float>(first_position + i) * inv_freq[c];
        const double cos = std::cos(double{angle}), sin = std::sin(double{angle});
        const double a = row[c], b = row[c + half];
        row[c] = static_cast<float>(a * cos - b * sin);
        row[c + half] = static_cast<float>(b * cos + a * sin);
      }
    }
  }
}

}  // namespace carrel::kernels
