#include <algorithm>

#include "common/bf16.h"
#include "kernels/encode/row_sum/row_sum.h"

namespace carrel::kernels {

void RefRowSum(const RowSumParams& p) {
  const int64_t share = (p.rows + p.parts - 1) / p.parts;
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    for (int64_t part = 0; part < p.parts; ++part) {
      for (int64_t c = 0; c < p.head_dim; ++c) {
        double sum = 0;
        for (int64_t j = part * share; j < std::min(p.rows, (part + 1) * share); ++j) {
          sum += Bf16ToFloat(p.x[(head * p.row_stride + j) * p.head_dim + c]);
        }
        p.sums[(head * p.parts + part) * p.head_dim + c] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace carrel::kernels
