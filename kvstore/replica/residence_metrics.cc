#include "kvstore/replica/residence_metrics.h"

namespace carrel::kvstore {
namespace {

MetricFamily One(MetricType type, const char* name, const char* help, double value) {
  return {.name = name, .help = help, .type = type, .samples = {{.value = value}}};
}

}  // namespace

std::vector<MetricFamily> ResidenceMetrics(const ResidenceStatistics& s) {
  const auto gauge = [](const char* name, const char* help, auto value) {
    return One(MetricType::kGauge, name, help, static_cast<double>(value));
  };
  const auto total = [](const char* name, const char* help, auto value) {
    return One(MetricType::kCounter, name, help, static_cast<double>(value));
  };
  return {
      gauge("carrel_replica_contexts", "Contexts of the bucket that lie here.", s.contexts),
      gauge("carrel_replica_bytes", "Bytes of contexts of the bucket that lie here.", s.bytes),
      gauge("carrel_replica_cache_bytes", "Bytes that they may take.", s.cache_bytes),
      gauge("carrel_replica_pulling", "Contexts on their way here.", s.pulling),
      gauge("carrel_replica_queued", "Contexts that wait for another's pull to end.", s.queued),
      gauge("carrel_replica_waiting", "Sessions that wait for a context.", s.waiting),
      gauge("carrel_replica_seconds_since_look", "Since the bucket's names were read last.",
            s.seconds_since_look),
      total("carrel_replica_pulls_total", "Contexts that came.", s.pulls),
      total("carrel_replica_pull_failures_total", "Pulls that ended without one.", s.pull_failures),
      total("carrel_replica_pulled_bytes_total", "Bytes of contexts that came.", s.pulled_bytes),
      total("carrel_replica_pull_seconds_total", "That their bytes took.", s.pull_seconds),
      total("carrel_replica_hits_total", "Sessions whose context was here.", s.hits),
      total("carrel_replica_evictions_total", "Contexts that went to make room.", s.evictions),
      total("carrel_replica_left_bucket_total",
            "Contexts that went because the bucket has them no "
            "more.",
            s.left_bucket)};
}

}  // namespace carrel::kvstore
