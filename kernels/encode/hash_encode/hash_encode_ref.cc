#include "kernels/encode/hash_encode/hash_encode.h"
#include "kernels/reference.h"

namespace carrel::kernels {

void RefHashEncode(const HashEncodeParams& p, float* margin) {
  for (int64_t h = 0; h < p.kv_heads; ++h) {
    for (int64_t j = 0; j < p.rows; ++j) {
      const uint16_t* x = p.x + (h * p.row_stride + j) * p.head_dim;
      uint32_t* code = p.codes + (h * p.code_stride + j) * (p.bits / 32);
      for (int64_t i = 0; i < p.bits; ++i) {
        const uint16_t* direction = p.matrix + (h * p.bits + i) * p.head_dim;
        double sum = RefDot(x, direction, p.head_dim);
        const double xx = RefDot(x, x, p.head_dim);
        const double dd = RefDot(direction, direction, p.head_dim);
        if (p.threshold != nullptr) sum -= p.threshold[h * p.bits + i];
        const uint32_t bit = 1u << (i % 32);
        code[i / 32] = sum > 0 ? code[i / 32] | bit : code[i / 32] & ~bit;
        if (margin != nullptr) {
          margin[(h * p.rows + j) * p.bits + i] =
              xx * dd == 0 ? 0.0f : static_cast<float>(sum / std::sqrt(xx * dd));
        }
      }
    }
  }
}

}  // namespace carrel::kernels
