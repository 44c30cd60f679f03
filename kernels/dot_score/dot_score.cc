#include "kernels/dot_score/dot_score.h"

#include <cstring>

#include "common/dtype.h"

namespace carrel::kernels {

void DotScoreRows(const float* q, int64_t group, int64_t head_dim, const void* const* k,
                  int64_t rows, float scale, float* scores, int64_t score_stride) {
  RefDotScoreRows(q, group, head_dim, k, rows, scale, scores, score_stride);
}

void DotScore(const float* q, int64_t group, int64_t head_dim, const void* k, int64_t rows,
              float scale, float* scores, int64_t score_stride) {
  for (int64_t j = 0; j < rows; ++j) {
    const void* row = static_cast<const uint8_t*>(k) + j * head_dim * 2;
    RefDotScoreRows(q, group, head_dim, &row, 1, scale, scores + j, score_stride);
  }
}

float DotF32Bf16(const float* q, const void* k, int64_t head_dim) {
  const auto* row = static_cast<const uint8_t*>(k);
  float sum = 0;
  for (int64_t c = 0; c < head_dim; ++c) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * c, sizeof(bits));
    sum += q[c] * Bf16ToFloat(bits);
  }
  return sum;
}

float DotBf16(const void* a, const void* b, int64_t head_dim) {
  const auto* row = static_cast<const uint8_t*>(a);
  float sum = 0;
  for (int64_t c = 0; c < head_dim; ++c) {
    uint16_t bits;
    std::memcpy(&bits, row + 2 * c, sizeof(bits));
    const float x = Bf16ToFloat(bits);
    std::memcpy(&bits, static_cast<const uint8_t*>(b) + 2 * c, sizeof(bits));
    sum += x * Bf16ToFloat(bits);
  }
  return sum;
}

}  // namespace carrel::kernels
