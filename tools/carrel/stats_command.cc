#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/service/context_client.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/store_flags.h"

namespace carrel::tools {
namespace {

struct StatsFlags {
  StoreFlags store;
  bool json = false;
};

absl::Status RunStats(const StatsFlags& flags) {
  ASSIGN_OR_RETURN(const ConnectedStore at, flags.store.Connect(kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const v1::StatisticsResponse statistics, at.client->Statistics());
  if (flags.json) {
    nlohmann::json json = JsonOf(statistics);
    for (nlohmann::json& latency : json["latencies"]) {
      Rename(latency, "queued", "queued_us");
      Rename(latency, "searched", "searched_us");
    }
    PrintJson(json);
    return absl::OkStatus();
  }
  absl::PrintF("%d sessions, %d contexts open, %d requests waiting, %d refused\n",
               statistics.sessions(), statistics.open_contexts(), statistics.waiting(),
               statistics.refused());
  absl::PrintF("memory %s of %s; indexes %s, %d loaded, %d evicted; %d layers loaded, %d let go\n",
               FormatBytes(statistics.resident_bytes()),
               FormatBytes(statistics.memory_budget_bytes()), FormatBytes(statistics.index_bytes()),
               statistics.index_loads(), statistics.index_evictions(), statistics.layers_loaded(),
               statistics.layers_released());
  absl::PrintF(
      "files changed %d times, %d could not be read; scrubbed %s in %d passes, %d "
      "damaged\n",
      statistics.files_changed(), statistics.files_damaged(),
      FormatBytes(statistics.scrubbed_bytes()), statistics.scrub_passes(),
      statistics.scrub_failures());
  absl::PrintF("\n%-8s %10s %12s %12s %12s %12s %12s %12s   (us)\n", "request", "count",
               "queued p50", "p99", "search p50", "p90", "p99", "max");
  for (const auto& latency : statistics.latencies()) {
    absl::PrintF("%-8s %10d %12.0f %12.0f %12.0f %12.0f %12.0f %12.0f\n", latency.kind(),
                 latency.count(), latency.queued().p50(), latency.queued().p99(),
                 latency.searched().p50(), latency.searched().p90(), latency.searched().p99(),
                 latency.searched().max());
  }
  return absl::OkStatus();
}

}  // namespace

void AddStats(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<StatsFlags>();
  CLI::App& command = *app.add_subcommand(
      "stats", "What a running kvstore did and holds: latencies by kind of request, memory");
  flags->store.DeclareServer(command);
  command.get_option("--server")->required();
  command.add_flag("--json", flags->json, "report as one JSON object");
  command.callback([flags, &chosen] { chosen = [flags] { return RunStats(*flags); }; });
}

}  // namespace carrel::tools
