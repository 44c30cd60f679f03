#include <cmath>
#include <cstring>
#include <vector>

#include "common/bf16.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"

namespace carrel::kernels {

void RefSparseAttention(const SparseAttentionParams& p) {
  const int64_t stride = p.score_stride == 0 ? p.rows : p.score_stride;
  if (p.k != nullptr) {
    RefDotScoreRows(p.q, p.group, p.head_dim, p.k, p.rows, p.scale, p.scores, stride);
  }
  std::vector<double> sum(static_cast<size_t>(p.head_dim));
  for (int64_t h = 0; h < p.group; ++h) {
    const float* scores = p.scores + h * stride;
    const double lse = RefLogSumExp(scores, p.rows);
    sum.assign(sum.size(), 0.0);
    for (int64_t j = 0; j < p.rows; ++j) {
      const double weight = std::isinf(lse) ? 0.0 : std::exp(double{scores[j]} - lse);
      for (int64_t c = 0; c < p.head_dim; ++c) {
        uint16_t bits;
        std::memcpy(&bits, static_cast<const uint8_t*>(p.v[j]) + 2 * c, sizeof(bits));
        sum[c] += weight * double{Bf16ToFloat(bits)};
      }
    }
    for (int64_t c = 0; c < p.head_dim; ++c) p.out[h * p.head_dim + c] = static_cast<float>(sum[c]);
    p.lse[h] = static_cast<float>(lse);
  }
}

}  // namespace carrel::kernels
