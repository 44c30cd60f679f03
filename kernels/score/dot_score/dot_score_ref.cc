#include <cstring>

#include "common/bf16.h"
#include "kernels/score/dot_score/dot_score.h"

namespace carrel::kernels {

void RefDotScoreRows(const float* q, int64_t group, int64_t head_dim, const void* const* k,
                     int64_t rows, float scale, float* scores, int64_t score_stride) {
  for (int64_t h = 0; h < group; ++h) {
    for (int64_t j = 0; j < rows; ++j) {
      const auto* row = static_cast<const uint8_t*>(k[j]);
      double sum = 0;
      for (int64_t c = 0; c < head_dim; ++c) {
        uint16_t bits;
        std::memcpy(&bits, row + 2 * c, sizeof(bits));
        sum += double{q[h * head_dim + c]} * double{Bf16ToFloat(bits)};
      }
      scores[h * score_stride + j] = static_cast<float>(double{scale} * sum);
    }
  }
}

}  // namespace carrel::kernels
