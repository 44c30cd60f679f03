// What:    families of one sample, as whoever tells what a thing holds at this moment writes them down.
// Threads: reentrant.
//
//   families.push_back(GaugeFamily("carrel_sessions", "Sessions that are open.", sessions));
#pragma once

#include "common/metrics.h"

namespace carrel {

inline MetricFamily OneSample(MetricType type, const char* name, const char* help, double value) {
  MetricFamily family = {.name = name, .help = help, .type = type, .samples = {}};
  family.samples.push_back({.labels = {}, .value = value, .buckets = {}});
  return family;
}
// value: any number.
template <class Number>
MetricFamily GaugeFamily(const char* name, const char* help, Number value) {
  return OneSample(MetricType::kGauge, name, help, static_cast<double>(value));
}
// name: ends with _total.
template <class Number>
MetricFamily TotalFamily(const char* name, const char* help, Number value) {
  return OneSample(MetricType::kCounter, name, help, static_cast<double>(value));
}

}  // namespace carrel
