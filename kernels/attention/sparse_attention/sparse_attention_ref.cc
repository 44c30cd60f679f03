#include "common/dtype.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/reference.h"
#include "kernels/score/dot_score/dot_score.h"

namespace carrel::kernels {

void RefSparseAttention(const SparseAttentionParams& p) {
  const int64_t stride = p.score_stride == 0 ? p.rows : p.score_stride;
  if (p.k != nullptr) {
    RefDotScoreRows(p.q, p.group, p.head_dim, p.k, p.rows, p.scale, p.scores, stride);
  }
  std::vector<float> row(static_cast<size_t>(p.head_dim));
  for (int64_t h = 0; h < p.group; ++h) {
    const auto score = [&](int64_t j) { return double{p.scores[h * stride + j]}; };
    const auto value = [&](int64_t j) {
      WidenToFloat(DType::kBf16, p.v[j], p.head_dim, row.data());  // rows lie at any byte
      return row.data();
    };
    p.lse[h] =
        static_cast<float>(RefAttend(p.rows, p.head_dim, score, value, p.out + h * p.head_dim));
  }
}

}  // namespace carrel::kernels
