#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attention/prefill_attention/prefill_attention.h"

namespace carrel::kernels {

void RefPrefillAttention(const PrefillAttentionParams& p) {
  std::vector<double> score(static_cast<size_t>(p.first_position + p.n));
  std::vector<double> sum(static_cast<size_t>(p.head_dim));
  for (int64_t i = 0; i < p.n; ++i) {
    const int64_t keys = p.first_position + i + 1;
    double max = -INFINITY;
    for (int64_t j = 0; j < keys; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < p.head_dim; ++c) {
        dot += double{p.q[i * p.q_stride + c]} * double{p.k[j * p.head_dim + c]};
      }
      score[j] = double{p.scale} * dot;
      max = std::max(max, score[j]);
    }
    double total = 0;
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t j = 0; j < keys; ++j) {
      const double weight = std::exp(score[j] - max);
      total += weight;
      for (int64_t c = 0; c < p.head_dim; ++c) sum[c] += weight * double{p.v[j * p.head_dim + c]};
    }
    for (int64_t c = 0; c < p.head_dim; ++c) {
      p.out[i * p.out_stride + c] = static_cast<float>(sum[c] / total);
    }
  }
}

}  // namespace carrel::kernels
