#include "tools/carrel/observe_flags.h"

#include <CLI/CLI.hpp>
#include <iterator>

#include "common/metrics.h"
#include "kvstore/engine/engine.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/replica/residence_metrics.h"
#include "kvstore/service/metrics_listener.h"
#include "kvstore/service/metrics_text.h"
#include "kvstore/service/server.h"

namespace carrel::tools {

void ObserveFlags::Declare(CLI::App& command) {
  command.add_option("--metrics", metrics,
                     "HOST:PORT or PORT (on 127.0.0.1) where Prometheus finds /metrics; names of "
                     "contexts and keys are seen there; not given: nowhere");
  command.add_option("--log-format", log.format, "text or json: one object a line");
  command.add_option("--log-level", log.level, "trace, debug, info, warning, error or off");
}

absl::StatusOr<std::unique_ptr<kvstore::MetricsListener>> ObserveFlags::Listen(
    kvstore::Engine* engine, kvstore::Server* server, const kvstore::Residence* residence) const {
  if (metrics.empty()) return nullptr;
  kvstore::DeclareMetrics();
  return kvstore::MetricsListener::Start(metrics, [engine, server, residence] {
    std::vector<MetricFamily> families = SnapshotMetrics();
    for (std::vector<MetricFamily> more :
         {kvstore::EngineMetrics(engine->Statistics()),
          kvstore::ServiceMetrics(server->statistics()), kvstore::TenantMetrics(server->tenants()),
          kvstore::ProcessMetrics(),
          residence == nullptr ? std::vector<MetricFamily>()
                               : kvstore::ResidenceMetrics(residence->Statistics())}) {
      families.insert(families.end(), std::make_move_iterator(more.begin()),
                      std::make_move_iterator(more.end()));
    }
    return kvstore::MetricsText(families);
  });
}

}  // namespace carrel::tools
