#include <cstring>

#include "kernels/int8_score/int8_score.h"

namespace carrel::kernels {

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
