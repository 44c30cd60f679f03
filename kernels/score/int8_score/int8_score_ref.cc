#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/score/int8_score/int8_score.h"

namespace carrel::kernels {

Int8Error RefPackInt8(const float* rows, int64_t count, int64_t dim, void* block) {
  auto* bytes = static_cast<char*>(block);
  std::memset(bytes, 0, static_cast<size_t>(Int8BlockBytes(dim)));
  double largest_residual = 0, largest_norm = 0;
  for (int64_t r = 0; r < count; ++r) {
    const float* row = rows + r * dim;
    float largest = 0;
    for (int64_t c = 0; c < dim; ++c) largest = std::max(largest, std::abs(row[c]));
    // Of zeros, and of what is too small for a scale, nothing is kept.
    const float scale = largest / 127;
    if (scale > 0) std::memcpy(bytes + 4 * r, &scale, sizeof(scale));
    double residual = 0, norm = 0;
    for (int64_t c = 0; c < dim; ++c) {
      const float number =
          scale > 0 ? std::clamp(std::nearbyint(row[c] / scale), -127.0f, 127.0f) : 0.0f;
      bytes[64 + c / 4 * 64 + 4 * r + c % 4] = static_cast<char>(static_cast<int8_t>(number));
      const double left = row[c] - double{number} * scale;
      residual += left * left;
      norm += double{row[c]} * row[c];
    }
    largest_residual = std::max(largest_residual, residual);
    largest_norm = std::max(largest_norm, norm);
  }
  return {static_cast<float>(std::sqrt(largest_residual)),
          static_cast<float>(std::sqrt(largest_norm))};
}

void RefInt8Score(const Int8Queries& q, const void* blocks, int64_t count, float* out,
                  int64_t stride) {
  const int64_t padded = (q.dim + 3) / 4 * 4;
  for (int64_t j = 0; j < count * kInt8BlockRows; ++j) {
    const char* block =
        static_cast<const char*>(blocks) + j / kInt8BlockRows * Int8BlockBytes(q.dim);
    const int64_t r = j % kInt8BlockRows;
    float row_scale;
    std::memcpy(&row_scale, block + 4 * r, sizeof(row_scale));
    const auto* numbers = reinterpret_cast<const int8_t*>(block + 64);
    for (int64_t h = 0; h < q.group; ++h) {
      int64_t sum = 0;
      for (int64_t c = 0; c < q.dim; ++c) {
        sum += int64_t{q.values[static_cast<size_t>(h * padded + c)]} *
               numbers[c / 4 * 64 + 4 * r + c % 4];
      }
      out[h * stride + j] = static_cast<float>(sum) * row_scale * q.scale[static_cast<size_t>(h)];
    }
  }
}

}  // namespace carrel::kernels
