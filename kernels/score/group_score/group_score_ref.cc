#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/score/group_score/group_score.h"

namespace carrel::kernels {

void RefGroupScore(const float* scores, int64_t group, int64_t rows, int64_t stride,
                   const float* base, float* out) {
  for (int64_t j = 0; j < rows; ++j) {
    float best = scores[j] - base[0];
    for (int64_t h = 1; h < group; ++h) best = std::max(best, scores[h * stride + j] - base[h]);
    out[j] = best;
  }
}

double RefLogSumExp(const float* scores, int64_t rows) {
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < rows; ++j) max = std::max(max, double{scores[j]});
  if (!std::isfinite(max)) return max;
  double sum = 0;
  for (int64_t j = 0; j < rows; ++j) sum += std::exp(double{scores[j]} - max);
  return max + std::log(sum);
}

}  // namespace carrel::kernels
