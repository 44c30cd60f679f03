#include "common/metrics.h"

#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"

namespace carrel {
namespace {

template <typename T>
struct Family {
  std::string help;
  std::map<MetricLabels, std::unique_ptr<T>> series;
};

template <typename T>
class Families {
 public:
  T& Find(absl::string_view name, absl::string_view help, const MetricLabels& labels) {
    absl::MutexLock lock(&mu_);
    Family<T>& family = families_[std::string(name)];
    if (family.help.empty()) family.help = std::string(help);
    if (const auto it = family.series.find(labels); it != family.series.end()) return *it->second;
    MetricLabels own = labels;
    if (static_cast<int>(family.series.size()) >= kMaxSeries) {
      for (auto& [label, value] : own) value = "other";
    }
    std::unique_ptr<T>& made = family.series[own];
    if (made == nullptr) made = std::make_unique<T>();
    return *made;
  }

  template <typename Fill>
  void Append(MetricType type, Fill fill, std::map<std::string, MetricFamily>& all) const {
    absl::MutexLock lock(&mu_);
    for (const auto& [name, family] : families_) {
      MetricFamily& to = all[name];
      CARREL_CHECK(to.name.empty());  // a counter and a histogram of one name
      to.name = name;
      to.help = family.help;
      to.type = type;
      for (const auto& [labels, one] : family.series) {
        to.samples.push_back({.labels = labels});
        fill(*one, to.samples.back());
      }
    }
  }

 private:
  mutable absl::Mutex mu_;
  std::map<std::string, Family<T>> families_ ABSL_GUARDED_BY(mu_);
};

// Never destroyed: threads count until the end.
Families<Counter>& Counters() {
  static auto* counters = new Families<Counter>;
  return *counters;
}
Families<Histogram>& Histograms() {
  static auto* histograms = new Families<Histogram>;
  return *histograms;
}

}  // namespace

Counter& CounterOf(absl::string_view name, absl::string_view help, const MetricLabels& labels) {
  return Counters().Find(name, help, labels);
}

Histogram& HistogramOf(absl::string_view name, absl::string_view help, const MetricLabels& labels) {
  return Histograms().Find(name, help, labels);
}

std::vector<MetricFamily> SnapshotMetrics() {
  std::map<std::string, MetricFamily> all;
  Counters().Append(
      MetricType::kCounter,
      [](const Counter& counter, MetricSample& sample) {
        sample.value = static_cast<double>(counter.value());
      },
      all);
  Histograms().Append(
      MetricType::kHistogram,
      [](const Histogram& histogram, MetricSample& sample) {
        sample.buckets = histogram.Snapshot();
      },
      all);
  std::vector<MetricFamily> families;
  for (auto& [name, family] : all) families.push_back(std::move(family));
  return families;
}

}  // namespace carrel
