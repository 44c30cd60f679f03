// What:   how good a layer's attention was: how far it is from dense attention, per token, and what share of
//         the softmax the attended rows carry; and when approximate candidates may be used unverified: a
//         cosine, learned from samples of (cosine of q~ and q, hit rate of the candidates).
// Math:   ||o - dense|| / ||dense|| over all q heads, where o = merge(window, zone) and dense =
//         merge(window, every row of the zone), for the same queries.
//         mass: sum of exp(score - lse) of the attended rows over the zone, or over zone and window.
//         threshold = min { c : mean hit rate of the samples with cosine >= c is >= wanted }; above
//         1 (never) if there is none.
// Shapes: partials [n, q_heads].
// Edge:   dense of zero: the norm of o. Without samples nothing is trusted.
// Cost:   O(samples) per Threshold::value().
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "common/ids.h"
#include "decoder/statistics.h"
#include "decoder/window/partial.h"

namespace carrel::decoder {

// Adds n values.
void AddOutputErrors(const Partial& window, const Partial& zone, const Partial& dense_zone,
                     int64_t n, const AttentionShape& shape, Mean& error);

// To mass and attended_mass, of n tokens' q heads: zone_lse of every row of the zone, rows_lse of those
// attended, window_lse of what the decoder holds.
void AddMass(const std::vector<float>& zone_lse, const std::vector<float>& rows_lse,
             const std::vector<float>& window_lse, LayerStatistics& statistics);

class Threshold {
 public:
  static constexpr double kNever = 2.0;
  static constexpr int64_t kEnough = 256;  // samples after which calibration stops

  void Add(double cosine, double hit_rate) {
    hit_rates_[cosine].Add(hit_rate);
    ++samples_;
  }
  int64_t samples() const { return samples_; }

  double value(double wanted_hit_rate) const {
    double value = kNever;
    Mean so_far;
    for (const auto& [cosine, hit_rate] : hit_rates_) {
      so_far.sum += hit_rate.sum;
      so_far.count += hit_rate.count;
      if (so_far.sum >= wanted_hit_rate * static_cast<double>(so_far.count)) value = cosine;
    }
    return value;
  }

 private:
  std::map<double, Mean, std::greater<>> hit_rates_;  // by cosine, ties together
  int64_t samples_ = 0;
};

}  // namespace carrel::decoder
