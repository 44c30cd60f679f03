#include "decoder/zone/output_error.h"

#include <cmath>

#include "kernels/attention/merge_states/merge_states.h"

namespace carrel::decoder {

void AddOutputErrors(const Partial& window, const Partial& zone, const Partial& dense_zone,
                     int64_t n, const AttentionShape& shape, Mean& error) {
  const int64_t heads = shape.q_heads, width = heads * shape.head_dim;
  Partial out = window, dense = window;
  kernels::MergeStates(out.out.data(), out.lse.data(), zone.out.data(), zone.lse.data(), n * heads,
                       shape.head_dim);
  kernels::MergeStates(dense.out.data(), dense.lse.data(), dense_zone.out.data(),
                       dense_zone.lse.data(), n * heads, shape.head_dim);
  for (int64_t i = 0; i < n; ++i) {
    double difference = 0, norm = 0;
    for (int64_t c = i * width; c < (i + 1) * width; ++c) {
      const double expected = dense.out[static_cast<size_t>(c)];
      const double off = out.out[static_cast<size_t>(c)] - expected;
      difference += off * off;
      norm += expected * expected;
    }
    error.Add(std::sqrt(norm > 0 ? difference / norm : difference));
  }
}

}  // namespace carrel::decoder
