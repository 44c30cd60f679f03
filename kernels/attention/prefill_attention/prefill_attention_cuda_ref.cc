#include <algorithm>
#include <cmath>
#include <vector>

#include "common/bf16.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"

namespace carrel::kernels {

void RefPrefillAttentionCuda(const PrefillAttentionCudaParams& p, int64_t token, float* out,
                             float* lse) {
  const int64_t d = p.head_dim, group = p.q_heads / p.kv_heads;
  const int64_t keys = std::min(p.rows, p.first_position + token + 1);
  std::vector<double> weight(static_cast<size_t>(keys)), sum(static_cast<size_t>(d));
  for (int64_t h = 0; h < p.q_heads; ++h) {
    const Bf16* q = p.q + (token * p.q_heads + h) * d;
    const Bf16* k = p.kv.k + h / group * p.kv.row_stride * d;
    const Bf16* v = p.kv.v + h / group * p.kv.row_stride * d;
    double top = -INFINITY, total = 0;
    for (int64_t j = 0; j < keys; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < d; ++c) {
        dot += double{Bf16ToFloat(q[c])} * double{Bf16ToFloat(k[j * d + c])};
      }
      weight[j] = double{p.scale} * dot;
      top = std::max(top, weight[j]);
    }
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t j = 0; j < keys; ++j) {
      const double w = std::exp(weight[j] - top);
      total += w;
      for (int64_t c = 0; c < d; ++c) sum[c] += w * double{Bf16ToFloat(v[j * d + c])};
    }
    for (int64_t c = 0; c < d; ++c)
      out[h * d + c] = keys > 0 ? static_cast<float>(sum[c] / total) : 0;
    lse[h] = keys > 0 ? static_cast<float>(top + std::log(total)) : -INFINITY;
  }
}

}  // namespace carrel::kernels
