#include "kernels/group_score/group_score.h"
namespace carrel::kernels {

void GroupScore(const float* scores, int64_t group, int64_t rows, int64_t stride, const float* base,
                float* out) {
  RefGroupScore(scores, group, rows, stride, base, out);
}

float LogSumExp(const float* scores, int64_t rows) {
  return static_cast<float>(RefLogSumExp(scores, rows));
}

}  // namespace carrel::kernels
