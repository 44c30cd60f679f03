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

std::vector<int64_t> RefBestIndices(const std::vector<float>& scores, int64_t k) {
  std::vector<int64_t> best(scores.size());
  best.resize(static_cast<size_t>(
      RefTopK(scores.data(), static_cast<int64_t>(scores.size()), k, best.data())));
  std::sort(best.begin(), best.end());
  return best;
}

}  // namespace carrel::kernels
