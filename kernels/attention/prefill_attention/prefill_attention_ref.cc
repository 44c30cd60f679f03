#include "kernels/attention/prefill_attention/prefill_attention.h"
#include "kernels/reference.h"

namespace carrel::kernels {

void RefPrefillAttention(const PrefillAttentionParams& p) {
  const int64_t d = p.head_dim;
  for (int64_t i = 0; i < p.n; ++i) {
    const float* const q = p.q + i * p.q_stride;
    RefAttend(
        p.first_position + i + 1, d, [&](int64_t j) { return p.scale * RefDot(q, p.k + j * d, d); },
        [&](int64_t j) { return p.v + j * d; }, p.out + i * p.out_stride);
  }
}

}  // namespace carrel::kernels
