#include "kernels/encode/sign_moments/sign_moments.h"

namespace carrel::kernels {

void RefAddSignMoments(float* y, int64_t rows, int64_t columns, int32_t* positive,
                       int32_t* differ) {
  for (int64_t n = 0; n < rows; ++n) {
    float* row = y + n * columns;
    for (int64_t i = 0; i < columns; ++i) row[i] = row[i] > 0 ? 1.0f : -1.0f;
    for (int64_t i = 0; i < columns; ++i) {
      positive[i] += row[i] > 0;
      for (int64_t j = 0; j < columns; ++j) differ[i * columns + j] += row[i] != row[j];
    }
  }
}

}  // namespace carrel::kernels
