// What:   what a service counts, as Prometheus reads it: names in README.md.
// Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/metrics.h"
#include "http_api/completion.h"

namespace carrel::http_api {

void CountRequest(absl::string_view route, const absl::Status& status);
// finish: "stop", "length", "failed", "left": the client did.
void CountAnswer(absl::string_view finish, const Usage& usage, const Figures& figures);

struct ApiGauges {
  int64_t connections = 0, connections_evicted = 0, clients_slow = 0;
  int64_t bytes_held = 0, bytes_refused = 0;
  int64_t answers_waiting = 0, answers_running = 0, documents_waiting = 0;
  int64_t sequences_in_memory = 0, sequences_in_files = 0;
};
// All of this process, in the text format.
// more: of others in the process.
std::string ApiMetricsText(const ApiGauges& gauges, std::vector<MetricFamily> more = {});

}  // namespace carrel::http_api
