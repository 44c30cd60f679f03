#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/reference.h"

namespace carrel::kernels {

void RefPrefillAttentionCuda(const PrefillAttentionCudaParams& p, int64_t token, float* out,
                             float* lse) {
  const int64_t d = p.head_dim, group = p.q_heads / p.kv_heads;
  const int64_t keys = std::min(p.rows, p.first_position + token + 1);
  for (int64_t h = 0; h < p.q_heads; ++h) {
    const Bf16* q = p.q + (token * p.q_heads + h) * d;
    const Bf16* k = p.kv.k + h / group * p.kv.row_stride * d;
    const Bf16* v = p.kv.v + h / group * p.kv.row_stride * d;
    const auto score = [&](int64_t j) { return p.scale * RefDot(q, k + j * d, d); };
    const auto value = [&](int64_t j) { return v + j * d; };
    lse[h] = static_cast<float>(RefAttend(keys, d, score, value, out + h * d));
  }
}

}  // namespace carrel::kernels
