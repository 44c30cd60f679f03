#include "kernels/attention/prefill_attention/prefill_attention.h"
#include "kernels/reference.h"

namespace carrel::kernels {

void RefPrefillAttention(const PrefillAttentionParams& p) {
  const int64_t d = p.head_dim;
  for (int64_t i = 0; i < p.n * p.heads; ++i) {
    const int64_t token = i / p.heads, at = i % p.heads * d;
    const float* const q = p.q + token * p.q_stride + at;
    RefAttend(
        p.first_position + token + 1, d,
        [&](int64_t j) { return p.scale * RefDot(q, p.k + j * d, d); },
        [&](int64_t j) { return p.v + j * d; }, p.out + token * p.out_stride + at);
  }
}

}  // namespace carrel::kernels
