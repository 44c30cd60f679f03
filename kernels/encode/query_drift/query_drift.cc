#include "kernels/encode/query_drift/query_drift.h"

#include <algorithm>

#include "kernels/layer/rope/rope.h"

namespace carrel::kernels {

void LearnQueryDrift(const QueryDriftParams& p) {
  const int64_t width = p.heads * p.head_dim;
  float *const known = p.scratch, *const lack = p.scratch + width;
  std::copy_n(p.mean, width, known);
  for (int64_t i = 0; i < p.n; ++i) {
    const float* q = p.q + i * width;
    const float* predicted_q = p.predicted_q + i * width;
    for (int64_t c = 0; c < width; ++c) lack[c] = q[c] - predicted_q[c];
    if (p.inv_freq != nullptr) {  // at a negative angle it is its inverse
      Rope(lack, 1, p.heads, p.head_dim, -(p.first_position + i), p.inv_freq);
    }
    const float weight = std::max(p.newest, 1.0f / static_cast<float>(++*p.tokens));
    for (int64_t c = 0; c < width; ++c) p.mean[c] += weight * (known[c] + lack[c] - p.mean[c]);
  }
}

}  // namespace carrel::kernels
