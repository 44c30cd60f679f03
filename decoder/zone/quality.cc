#include "decoder/zone/quality.h"

#include <algorithm>
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

void AddMass(const std::vector<float>& zone_lse, const std::vector<float>& rows_lse,
             const std::vector<float>& window_lse, LayerStatistics& statistics) {
  for (size_t i = 0; i < zone_lse.size(); ++i) {
    const double top = std::max(zone_lse[i], window_lse[i]);
    const double all = std::exp(zone_lse[i] - top) + std::exp(window_lse[i] - top);
    statistics.mass.Add(std::exp(double{rows_lse[i]} - zone_lse[i]));
    statistics.attended_mass.Add((std::exp(rows_lse[i] - top) + std::exp(window_lse[i] - top)) /
                                 all);
  }
}

}  // namespace carrel::decoder
