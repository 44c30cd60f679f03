#include "kernels/attention/merge_states/merge_states.h"

#include <algorithm>
#include <cmath>

namespace carrel::kernels {

void MergeStates(float* out_a, float* lse_a, const float* out_b, const float* lse_b, int64_t heads,
                 int64_t head_dim) {
  for (int64_t h = 0; h < heads; ++h) {
    float* a = out_a + h * head_dim;
    const float* b = out_b + h * head_dim;
    // Empty sets first: their out is not read, and the other side keeps its bits.
    if (lse_b[h] == -INFINITY) continue;
    if (lse_a[h] == -INFINITY) {
      std::copy_n(b, head_dim, a);
      lse_a[h] = lse_b[h];
      continue;
    }
    // fp64 for the few scalars: lse may be 1e4 and the weights depend on its last bits.
    const double max = std::max(lse_a[h], lse_b[h]);
    const double exp_a = std::exp(lse_a[h] - max), exp_b = std::exp(lse_b[h] - max);
    const double sum = exp_a + exp_b;
    const auto weight_a = static_cast<float>(exp_a / sum);
    const auto weight_b = static_cast<float>(exp_b / sum);
    for (int64_t c = 0; c < head_dim; ++c) a[c] = weight_a * a[c] + weight_b * b[c];
    lse_a[h] = static_cast<float>(max + std::log(sum));
  }
}

}  // namespace carrel::kernels
