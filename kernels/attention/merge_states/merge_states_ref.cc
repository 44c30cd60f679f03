#include <cmath>
#include <limits>

#include "kernels/attention/merge_states/merge_states.h"

namespace carrel::kernels {

void RefMergeStates(float* out_a, float* lse_a, const float* out_b, const float* lse_b,
                    int64_t heads, int64_t head_dim) {
  for (int64_t h = 0; h < heads; ++h) {
    const double a = lse_a[h], b = lse_b[h];
    const double max = std::fmax(a, b);
    if (max == -std::numeric_limits<double>::infinity()) continue;
    const double lse = max + std::log(std::exp(a - max) + std::exp(b - max));
    for (int64_t c = h * head_dim; c < (h + 1) * head_dim; ++c) {
      out_a[c] = static_cast<float>(std::exp(a - lse) * double{out_a[c]} +
                                    std::exp(b - lse) * double{out_b[c]});
    }
    lse_a[h] = static_cast<float>(lse);
  }
}

}  // namespace carrel::kernels
