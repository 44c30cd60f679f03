// What:   when approximate candidates may be used unverified: a cosine, learned from samples of
//         (cosine of q~ and q, hit rate of the candidates).
// Math:   threshold = min { c : mean hit rate of the samples with cosine >= c is >= wanted }; above
//         1 (never) if there is none.
// Edge:   without samples nothing is trusted.   Cost: O(samples) per value().
#pragma once

#include <cstdint>
#include <functional>
#include <map>

#include "decoder/statistics.h"

namespace carrel::decoder {

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
