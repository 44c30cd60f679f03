#include <algorithm>
#include <cmath>
#include <vector>

#include "common/dtype.h"
#include "kernels/attention/window_attention/window_attention.h"

namespace carrel::kernels {

void RefWindowAttention(const WindowAttentionParams& p) {
  std::vector<double> score(static_cast<size_t>(p.rows));
  std::vector<double> sum(static_cast<size_t>(p.head_dim));
  const auto number = [&p](const void* rows, int64_t i) -> double {
    return p.bf16 ? Bf16ToFloat(static_cast<const uint16_t*>(rows)[i])
                  : static_cast<const float*>(rows)[i];
  };
  for (int64_t h = 0; h < p.group; ++h) {
    double max = -INFINITY;
    for (int64_t j = 0; j < p.rows; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < p.head_dim; ++c) {
        dot += double{p.q[h * p.head_dim + c]} * number(p.k, j * p.head_dim + c);
      }
      score[j] = double{p.scale} * dot;
      max = std::max(max, score[j]);
    }
    double total = 0;
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t j = 0; j < p.rows; ++j) {
      const double weight = std::exp(score[j] - max);
      total += weight;
      for (int64_t c = 0; c < p.head_dim; ++c) sum[c] += weight * number(p.v, j * p.head_dim + c);
    }
    for (int64_t c = 0; c < p.head_dim; ++c) {
      p.out[h * p.head_dim + c] = p.rows == 0 ? 0.0f : static_cast<float>(sum[c] / total);
    }
    p.lse[h] = p.rows == 0 ? -INFINITY : static_cast<float>(max + std::log(total));
  }
}

}  // namespace carrel::kernels
