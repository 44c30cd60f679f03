#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/select/topk/topk.h"

namespace carrel::kernels {

int64_t RefTopK(const float* scores, int64_t n, int64_t k, int64_t* out) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto value = [&](int64_t i) { return std::isnan(scores[i]) ? -INFINITY : scores[i]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return value(a) > value(b); });
  const int64_t count = std::min(n, k);
  std::copy_n(order.begin(), count, out);
  return count;
}

}  // namespace carrel::kernels
