#include "common/bf16.h"
#include "kernels/embedding/embedding_cuda.h"

namespace carrel::kernels {

void RefEmbedding(const uint16_t* table, const int32_t* ids, int64_t n, int64_t dim, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < dim; ++c) y[i * dim + c] = Bf16ToFloat(table[ids[i] * dim + c]);
  }
}

}  // namespace carrel::kernels
