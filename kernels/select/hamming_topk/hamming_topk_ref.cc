#include <bit>

#include "kernels/select/hamming_topk/hamming_topk.h"

namespace carrel::kernels {

void RefHammingScores(const HammingTopKParams& p, uint16_t* scores) {
  const int64_t words = p.bits / 32;
  for (int64_t g = 0; g < p.kv_heads; ++g) {
    for (int64_t j = 0; j < p.rows; ++j) {
      const uint32_t* code = p.codes + (g * p.code_stride + j) * words;
      int64_t score = 0;
      for (int64_t h = 0; h < p.group; ++h) {
        const uint32_t* query = p.queries + (g * p.group + h) * words;
        score += p.bits;
        for (int64_t w = 0; w < words; ++w) score -= std::popcount(query[w] ^ code[w]);
      }
      scores[g * p.rows + j] = static_cast<uint16_t>(score);
    }
  }
}

}  // namespace carrel::kernels
