#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "carrel/v1/context.pb.h"
#include "common/json.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/service/context_client.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/store_flags.h"

namespace carrel::tools {
namespace {

struct StatsFlags {
  StoreFlags store;
  bool json = false;
};

nlohmann::json ToJson(const v1::StatisticsResponse::Quantiles& q) {
  return {
      {"mean", q.mean()}, {"p50", q.p50()}, {"p90", q.p90()}, {"p99", q.p99()}, {"max", q.max()}};
}

absl::Status RunStats(const StatsFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client, store->NewContextClient());
  ASSIGN_OR_RETURN(const v1::StatisticsResponse statistics, client->Statistics());
  if (flags.json) {
    nlohmann::json latencies = nlohmann::json::array();
    for (const auto& latency : statistics.latencies()) {
      latencies.push_back({{"kind", latency.kind()},
                           {"count", latency.count()},
                           {"queued_us", ToJson(latency.queued())},
                           {"searched_us", ToJson(latency.searched())}});
    }
    const nlohmann::json json = {{"latencies", latencies},
                                 {"sessions", statistics.sessions()},
                                 {"open_contexts", statistics.open_contexts()},
                                 {"waiting", statistics.waiting()},
                                 {"refused", statistics.refused()},
                                 {"resident_bytes", statistics.resident_bytes()},
                                 {"memory_budget_bytes", statistics.memory_budget_bytes()},
                                 {"index_bytes", statistics.index_bytes()},
                                 {"index_loads", statistics.index_loads()},
                                 {"index_evictions", statistics.index_evictions()},
                                 {"layers_released", statistics.layers_released()},
                                 {"layers_loaded", statistics.layers_loaded()},
                                 {"files_changed", statistics.files_changed()},
                                 {"files_damaged", statistics.files_damaged()},
                                 {"scrubbed_bytes", statistics.scrubbed_bytes()},
                                 {"scrub_passes", statistics.scrub_passes()},
                                 {"scrub_failures", statistics.scrub_failures()}};
    std::printf("%s\n", DumpJson(json).c_str());
    return absl::OkStatus();
  }
  std::printf("%lld sessions, %lld contexts open, %lld requests waiting, %lld refused\n",
              static_cast<long long>(statistics.sessions()),
              static_cast<long long>(statistics.open_contexts()),
              static_cast<long long>(statistics.waiting()),
              static_cast<long long>(statistics.refused()));
  std::printf(
      "memory %s of %s; indexes %s, %lld loaded, %lld evicted; %lld layers loaded, %lld let go\n",
      FormatBytes(statistics.resident_bytes()).c_str(),
      FormatBytes(statistics.memory_budget_bytes()).c_str(),
      FormatBytes(statistics.index_bytes()).c_str(),
      static_cast<long long>(statistics.index_loads()),
      static_cast<long long>(statistics.index_evictions()),
      static_cast<long long>(statistics.layers_loaded()),
      static_cast<long long>(statistics.layers_released()));
  std::printf(
      "files changed %lld times, %lld could not be read; scrubbed %s in %lld passes, %lld "
      "damaged\n",
      static_cast<long long>(statistics.files_changed()),
      static_cast<long long>(statistics.files_damaged()),
      FormatBytes(statistics.scrubbed_bytes()).c_str(),
      static_cast<long long>(statistics.scrub_passes()),
      static_cast<long long>(statistics.scrub_failures()));
  std::printf("\n%-8s %10s %12s %12s %12s %12s %12s %12s   (us)\n", "request", "count",
              "queued p50", "p99", "search p50", "p90", "p99", "max");
  for (const auto& latency : statistics.latencies()) {
    std::printf("%-8s %10lld %12.0f %12.0f %12.0f %12.0f %12.0f %12.0f\n", latency.kind().c_str(),
                static_cast<long long>(latency.count()), latency.queued().p50(),
                latency.queued().p99(), latency.searched().p50(), latency.searched().p90(),
                latency.searched().p99(), latency.searched().max());
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
