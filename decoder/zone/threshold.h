// What:   when approximate candidates may be used unverified: a cosine, learned from samples of
//         (cosine of q~ and q, hit rate of the candidates).
// Math:   threshold = min { c : mean hit rate of the samples with cosine >= c is >= wanted }; above
//         1 (never) if there is none.
// Edge:   without samples nothing is trusted.   Cost: O(samples log samples) per value().
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace carrel::decoder {

class Threshold {
 public:
  static constexpr double kNever = 2.0;
  static constexpr int64_t kEnough = 256;  // samples after which calibration stops

  void Add(double cosine, double hit_rate) {
    samples_.emplace_back(cosine, hit_rate);
    stale_ = true;
  }
  int64_t samples() const { return static_cast<int64_t>(samples_.size()); }

  double value(double wanted_hit_rate) {
    if (!stale_ && wanted_hit_rate == wanted_) return value_;
    wanted_ = wanted_hit_rate;
    std::sort(samples_.begin(), samples_.end(),
              [](const auto& a, const auto& b) { return a.first > b.first; });
    value_ = kNever;
    double sum = 0;
    for (size_t i = 0; i < samples_.size(); ++i) {
      sum += samples_[i].second;
      const bool last_of_ties =
          i + 1 == samples_.size() || samples_[i + 1].first < samples_[i].first;
      if (last_of_ties && sum >= wanted_hit_rate * static_cast<double>(i + 1))
        value_ = samples_[i].first;
    }
    stale_ = false;
    return value_;
  }

 private:
  std::vector<std::pair<double, double>> samples_;
  double value_ = kNever;
  double wanted_ = -1;
  bool stale_ = false;
};

}  // namespace carrel::decoder
