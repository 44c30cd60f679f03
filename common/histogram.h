// What:    a histogram of durations that many threads add to: buckets grow by a factor of 2^(1/4),
//          so a quantile is right to 19%.
// Threads: any; Add is one atomic addition.   Units: microseconds.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace carrel {

class Histogram {
 public:
  struct Summary {
    int64_t count = 0;
    double mean = 0, p50 = 0, p90 = 0, p99 = 0, max = 0;  // us; quantiles: their bucket's upper end
  };

  // For who adds up over processes: how many are at most each of Bounds(), ascending powers of 2 from
  // 4 us to 67 s. What is above the last is in count alone.
  struct Buckets {
    int64_t count = 0;
    double sum_us = 0;
    std::vector<int64_t> cumulative;  // [Bounds().size()]
  };
  static const std::vector<double>& Bounds();  // us

  void Add(double us);
  Summary Summarise() const;
  Buckets Snapshot() const;

 private:
  static constexpr int kBuckets = 128;  // up to 2^32 us
  static double UpperEnd(int bucket);

  std::array<std::atomic<int64_t>, kBuckets> buckets_{};
  std::atomic<int64_t> sum_ns_{0};
  std::atomic<int64_t> max_ns_{0};
};

}  // namespace carrel
