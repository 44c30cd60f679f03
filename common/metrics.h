// What:    what this process counts, under the names that operators see (docs/metrics.md): counters
//          and histograms that any part of it adds to. Who exposes them asks for a snapshot; nothing
//          here knows of a format or a network.
// Edge:    a name with the same labels is the same counter everywhere in the process. A family holds
//          at most kMaxSeries label sets: what comes after is counted under the values "other", so
//          that what clients choose (names of contexts, of keys) cannot fill the memory.
// Threads: any; Add is one atomic addition, looking one up takes a lock: keep the reference where it
//          is added to often. References live as long as the process.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/histogram.h"

namespace carrel {

inline constexpr int kMaxSeries = 256;

// Name and value, in the order of names that all uses of a family share.
using MetricLabels = std::vector<std::pair<std::string, std::string>>;

class Counter {
 public:
  void Add(int64_t count = 1) { value_.fetch_add(count, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

// name: carrel_THING_UNIT_total. help: a sentence; the first use of the name gives it.
Counter& CounterOf(absl::string_view name, absl::string_view help, const MetricLabels& labels = {});
// name: carrel_THING_seconds; what is added are microseconds.
Histogram& HistogramOf(absl::string_view name, absl::string_view help,
                       const MetricLabels& labels = {});

enum class MetricType : uint8_t { kCounter = 0, kGauge = 1, kHistogram = 2 };

struct MetricSample {
  MetricLabels labels;
  double value = 0;            // of a counter or gauge
  Histogram::Buckets buckets;  // of a histogram
};

struct MetricFamily {
  std::string name, help;
  MetricType type = MetricType::kCounter;
  std::vector<MetricSample> samples;
};

// Of every counter and histogram, ordered by name.
std::vector<MetricFamily> SnapshotMetrics();

}  // namespace carrel
