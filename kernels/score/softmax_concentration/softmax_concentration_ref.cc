#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/score/softmax_concentration/softmax_concentration.h"

namespace carrel::kernels {

Concentration RefSoftmaxConcentration(const float* scores, int64_t count, double share,
                                      float* scratch) {
  std::copy_n(scores, count, scratch);
  std::sort(scratch, scratch + count, std::greater<float>());
  const double max = scratch[0];
  double sum = 0, weighted = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double s = scratch[i] - max, e = std::exp(s);
    sum += e;
    weighted += s * e;
  }
  Concentration result{.entropy_nats = std::log(sum) - weighted / sum};
  for (double carried = 0; result.elements < count && carried < share * sum; ++result.elements) {
    carried += std::exp(scratch[result.elements] - max);
  }
  return result;
}

}  // namespace carrel::kernels
