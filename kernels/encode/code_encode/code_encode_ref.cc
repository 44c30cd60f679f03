#include <cstring>

#include "kernels/encode/code_encode/code_encode.h"
#include "kernels/reference.h"
#include "kernels/score/code_score/code_score.h"

namespace carrel::kernels {

void RefCodeEncode(const CodeEncodeParams& p, float* margin) {
  const int64_t block_bytes = CodeBlockBytes(p.bits);
  const int64_t count = (p.rows + kCodeBlockKeys - 1) / kCodeBlockKeys;
  std::memset(p.blocks, 0, static_cast<size_t>(count * block_bytes));
  const int64_t stage = p.feedback == nullptr ? p.bits : p.stage_bits;
  std::vector<double> y(static_cast<size_t>(p.bits));
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t i = 0; i < p.bits; ++i) {
      y[i] = p.offset[i] + RefDot(p.matrix + i * p.head_dim, p.x + row * p.head_dim, p.head_dim);
    }
    for (int64_t first = 0; first < p.bits; first += stage) {
      for (int64_t i = first + stage; i < p.bits; ++i) {
        for (int64_t j = first; j < first + stage; ++j) {
          y[i] -= double{p.feedback[i * p.bits + j]} * (y[j] > 0 ? 1 : -1);
        }
      }
    }
    const int64_t key = row % kCodeBlockKeys;
    uint8_t* const block = p.blocks + row / kCodeBlockKeys * block_bytes;
    const int64_t byte = key < 32 ? 2 * key : 2 * (key - 32) + 1;
    for (int64_t i = 0; i < p.bits; ++i) {
      if (y[i] > 0) {
        block[i / 8 * kCodeBlockKeys + byte] |= static_cast<uint8_t>(1 << (i % 8));
      }
      if (margin != nullptr) margin[row * p.bits + i] = static_cast<float>(std::abs(y[i]));
    }
  }
}

}  // namespace carrel::kernels
