#include <cmath>

#include "kernels/select/argmax/argmax_cuda.h"

namespace carrel::kernels {

void RefArgmax(const float* logits, int64_t n, int64_t count, int32_t* id) {
  for (int64_t i = 0; i < n; ++i, logits += count) {
    int64_t best = 0;
    bool nan = false;
    for (int64_t j = 0; j < count; ++j) {
      nan = nan || std::isnan(logits[j]);
      if (logits[j] > logits[best]) best = j;
    }
    id[i] = nan ? -1 : static_cast<int32_t>(best);
  }
}

}  // namespace carrel::kernels
