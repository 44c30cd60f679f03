#include "kvstore/replica/residence_metrics.h"

#include "common/metric_family.h"

namespace carrel::kvstore {
std::vector<MetricFamily> ResidenceMetrics(const ResidenceStatistics& s) {
  return {
      GaugeFamily("carrel_replica_contexts", "Contexts of the bucket that lie here.", s.contexts),
      GaugeFamily("carrel_replica_bytes", "Bytes of contexts of the bucket that lie here.",
                  s.bytes),
      GaugeFamily("carrel_replica_cache_bytes", "Bytes that they may take.", s.cache_bytes),
      GaugeFamily("carrel_replica_pulling", "Contexts on their way here.", s.pulling),
      GaugeFamily("carrel_replica_queued", "Contexts that wait for another's pull to end.",
                  s.queued),
      GaugeFamily("carrel_replica_waiting", "Sessions that wait for a context.", s.waiting),
      GaugeFamily("carrel_replica_warming", "Contexts of --warm that are not here yet.", s.warming),
      GaugeFamily("carrel_replica_seconds_since_look", "Since the bucket's names were read last.",
                  s.seconds_since_look),
      TotalFamily("carrel_replica_pulls_total", "Contexts that came.", s.pulls),
      TotalFamily("carrel_replica_pull_failures_total", "Pulls that ended without one.",
                  s.pull_failures),
      TotalFamily("carrel_replica_pulled_bytes_total", "Bytes of contexts that came.",
                  s.pulled_bytes),
      TotalFamily("carrel_replica_pull_seconds_total", "That their bytes took.", s.pull_seconds),
      TotalFamily("carrel_replica_hits_total", "Sessions whose context was here.", s.hits),
      TotalFamily("carrel_replica_evictions_total", "Contexts that went to make room.",
                  s.evictions),
      TotalFamily("carrel_replica_left_bucket_total",
                  "Contexts that went because the bucket has them no more.", s.left_bucket)};
}

}  // namespace carrel::kvstore
