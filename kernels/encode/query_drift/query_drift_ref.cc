#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/encode/query_drift/query_drift.h"

namespace carrel::kernels {

void RefLearnQueryDrift(const QueryDriftParams& p) {
  const int64_t half = p.head_dim / 2;
  const std::vector<double> known(p.mean, p.mean + p.heads * p.head_dim);
  std::vector<double> mean = known;
  for (int64_t i = 0; i < p.n; ++i) {
    const double weight = std::max(double{p.newest}, 1.0 / static_cast<double>(++*p.tokens));
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t c = 0; c < half; ++c) {
        const int64_t low = h * p.head_dim + c, high = low + half;
        const int64_t row = i * p.heads * p.head_dim;
        const double a = double{p.q[row + low]} - p.predicted_q[row + low];
        const double b = double{p.q[row + high]} - p.predicted_q[row + high];
        const float angle =
            p.inv_freq == nullptr ? 0.0f : static_cast<float>(p.first_position + i) * p.inv_freq[c];
        const double cosine = std::cos(double{angle}), sine = std::sin(double{angle});
        mean[low] += weight * (known[low] + a * cosine + b * sine - mean[low]);
        mean[high] += weight * (known[high] + b * cosine - a * sine - mean[high]);
      }
    }
  }
  for (size_t c = 0; c < mean.size(); ++c) p.mean[c] = static_cast<float>(mean[c]);
}

}  // namespace carrel::kernels
