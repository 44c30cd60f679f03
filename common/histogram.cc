#include "common/histogram.h"

#include <algorithm>
#include <cmath>

namespace carrel {

double Histogram::UpperEnd(int bucket) { return std::exp2((bucket + 1) / 4.0); }

void Histogram::Add(double us) {
  const double clamped = std::max(us, 0.0);
  const int bucket =
      clamped < 1 ? 0 : std::min(kBuckets - 1, static_cast<int>(4 * std::log2(clamped)));
  buckets_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  const auto ns = static_cast<int64_t>(std::min(clamped * 1e3, 9e18));
  sum_ns_.fetch_add(ns, std::memory_order_relaxed);
  int64_t max = max_ns_.load(std::memory_order_relaxed);
  while (ns > max && !max_ns_.compare_exchange_weak(max, ns, std::memory_order_relaxed)) {
  }
}

Histogram::Summary Histogram::Summarise() const {
  std::array<int64_t, kBuckets> counts;
  Summary summary;
  for (int i = 0; i < kBuckets; ++i) {
    counts[static_cast<size_t>(i)] =
        buckets_[static_cast<size_t>(i)].load(std::memory_order_relaxed);
    summary.count += counts[static_cast<size_t>(i)];
  }
  if (summary.count == 0) return summary;
  summary.mean = static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) / 1e3 /
                 static_cast<double>(summary.count);
  summary.max = static_cast<double>(max_ns_.load(std::memory_order_relaxed)) / 1e3;
  const auto quantile = [&](double share) {
    auto left = static_cast<int64_t>(std::ceil(share * static_cast<double>(summary.count)));
    for (int i = 0; i < kBuckets; ++i) {
      left -= counts[static_cast<size_t>(i)];
      if (left <= 0) return std::min(UpperEnd(i), summary.max);
    }
    return summary.max;
  };
  summary.p50 = quantile(0.5);
  summary.p90 = quantile(0.9);
  summary.p99 = quantile(0.99);
  return summary;
}

const std::vector<double>& Histogram::Bounds() {
  static const auto* bounds = [] {
    auto* powers = new std::vector<double>;
    for (int power = 2; power <= 26; ++power) powers->push_back(std::exp2(power));
    return powers;
  }();
  return *bounds;
}

Histogram::Buckets Histogram::Snapshot() const {
  Buckets snapshot;
  size_t bound = 0;
  for (int i = 0; i < kBuckets; ++i) {
    snapshot.count += buckets_[static_cast<size_t>(i)].load(std::memory_order_relaxed);
    if (bound == Bounds().size() || UpperEnd(i) < Bounds()[bound]) continue;
    snapshot.cumulative.push_back(snapshot.count);
    ++bound;
  }
  snapshot.sum_us = static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) / 1e3;
  return snapshot;
}

}  // namespace carrel
