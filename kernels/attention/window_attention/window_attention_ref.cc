#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/reference.h"

namespace carrel::kernels {

void RefWindowAttention(const WindowAttentionParams& p) {
  const int64_t d = p.head_dim;
  const auto attend = [&](const auto* k, const auto* v) {
    for (int64_t h = 0; h < p.group; ++h) {
      const auto score = [&](int64_t j) { return p.scale * RefDot(p.q + h * d, k + j * d, d); };
      const auto value = [&](int64_t j) { return v + j * d; };
      p.lse[h] = static_cast<float>(RefAttend(p.rows, d, score, value, p.out + h * d));
    }
  };
  if (p.bf16) {
    attend(static_cast<const uint16_t*>(p.k), static_cast<const uint16_t*>(p.v));
  } else {
    attend(static_cast<const float*>(p.k), static_cast<const float*>(p.v));
  }
}

}  // namespace carrel::kernels
