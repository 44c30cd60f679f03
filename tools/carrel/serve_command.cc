#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/status.h"
#include "kvstore/access/access.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/metrics_listener.h"
#include "kvstore/service/server.h"
#include "kvstore/storage/store.h"
#include "tools/carrel/access_flags.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/config_file.h"
#include "tools/carrel/observe_flags.h"

namespace carrel::tools {
namespace {

struct ServeFlags {
  std::string folder;
  kvstore::ServerConfig server;
  AccessFlags access;
  kvstore::EngineConfig engine;
  ObserveFlags observe;
  int64_t memory_mib = 0;
  // A terabyte in 17 hours, at a thousandth of a core.
  int64_t scrub_mib = 16;
  double drain_seconds = 30;
  double idle_seconds = 600;
};

absl::Status CheckSeconds(const char* flag, double seconds) {
  if (seconds >= 0 && seconds <= 86400) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, "=", seconds, " s is outside [0, 86400]"));
}

// SIGHUP: a log that was renamed is begun anew, and the keys are read at once.
void ReadAgain(const ServeFlags& flags, kvstore::AuditLog* audit) {
  if (audit != nullptr) {
    if (const absl::Status status = audit->Reopen(); !status.ok()) {
      std::fprintf(stderr, "carrel serve: SIGHUP: %s; lines go on to where they went\n",
                   std::string(status.message()).c_str());
    }
  }
  if (flags.server.access != nullptr) flags.server.access->Reload().IgnoreError();  // it logs
}

absl::Status RunServe(ServeFlags& flags) {
  if (flags.folder.empty()) return absl::InvalidArgumentError("serve: --store is required");
  RETURN_IF_ERROR(SetUpLog(flags.observe.log));
  if (flags.memory_mib < 0 || flags.memory_mib > (int64_t{1} << 30)) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory-budget=", flags.memory_mib, " MiB is outside [0, 1073741824]"));
  }
  flags.engine.memory_budget_bytes = flags.memory_mib << 20;
  RETURN_IF_ERROR(CheckSeconds("drain", flags.drain_seconds));
  RETURN_IF_ERROR(CheckSeconds("idle-timeout", flags.idle_seconds));
  flags.server.limits.idle_timeout =
      flags.idle_seconds == 0 ? absl::InfiniteDuration() : absl::Seconds(flags.idle_seconds);
  if (flags.scrub_mib < 0 || flags.scrub_mib > (int64_t{1} << 14)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scrub-rate=", flags.scrub_mib, " MiB/s is outside [0, 16384]"));
  }
  flags.engine.scrub_bytes_per_s = flags.scrub_mib << 20;
  // Every thread started from here on inherits the mask, so that only sigwait below sees these.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  sigaddset(&stop_signals, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);

  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::AuditLog> audit,
                   flags.access.Apply(flags.server));
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(flags.folder, kvstore::StoreMode::kReadWrite));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Engine> engine,
                   kvstore::Engine::Create(flags.engine, std::move(store)));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Server> server,
                   kvstore::Server::Start(flags.server, engine.get()));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::MetricsListener> metrics,
                   flags.observe.Listen(engine.get(), server.get()));
  std::fprintf(stderr,
               "carrel serve: %s ready on %s; memory budget %lld MiB, %d threads (0: one per "
               "core), queue of %lld, %lld connections of %lld file descriptors\n",
               flags.folder.c_str(), absl::StrJoin(server->addresses(), " ").c_str(),
               static_cast<long long>(engine->config().memory_budget_bytes >> 20),
               flags.engine.search_threads, static_cast<long long>(flags.engine.queue_limit),
               static_cast<long long>(server->statistics().max_connections),
               static_cast<long long>(server->statistics().max_descriptors));
  if (metrics != nullptr) {
    std::fprintf(stderr, "carrel serve: metrics on http://%s/metrics\n",
                 metrics->address().c_str());
  }
  int signal = 0;
  while (sigwait(&stop_signals, &signal) == 0 && signal == SIGHUP) ReadAgain(flags, audit.get());
  std::fprintf(stderr,
               "carrel serve: %s: no new sessions, waiting up to %.0f s for %lld open ones\n",
               strsignal(signal), flags.drain_seconds, static_cast<long long>(engine->sessions()));
  server->Drain(absl::Seconds(flags.drain_seconds));
  std::fprintf(stderr, "carrel serve: stopped\n");
  return absl::OkStatus();
}

}  // namespace

void AddServe(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App& command = *app.add_subcommand(
      "serve", "Answer decoders' queries over the contexts of a store, until SIGTERM or SIGINT");
  command.add_option("--store", flags->folder, "folder of the store; required");
  command
      .add_option("--listen", flags->server.listen,
                  "unix:PATH or HOST:PORT (port 0: any free one); may be repeated")
      ->capture_default_str();
  command
      .add_option("--threads", flags->engine.search_threads, "threads that search; 0: one per core")
      ->capture_default_str();
  command
      .add_option("--memory-budget", flags->memory_mib,
                  "MiB that the process may hold: loaded indexes and mapped pages of rows and "
                  "codes; 0: half of the machine's memory")
      ->capture_default_str();
  command
      .add_option("--queue", flags->engine.queue_limit,
                  "requests that may wait; one more is refused")
      ->capture_default_str();
  command.add_option("--max-open-contexts", flags->engine.max_open_contexts, "contexts kept open")
      ->capture_default_str();
  command.add_option("--max-sessions", flags->engine.max_sessions, "decoders at a time")
      ->capture_default_str();
  command
      .add_option(
          "--max-sessions-per-peer", flags->server.limits.max_sessions_per_peer,
          "decoders of one IP address, or of all that come over Unix sockets; 0: as many as "
          "--max-sessions")
      ->capture_default_str();
  command
      .add_option("--max-connections", flags->server.limits.max_connections,
                  "connections at a time; 0: 4096, or what the limit of file descriptors leaves")
      ->capture_default_str();
  command
      .add_option("--max-streams", flags->server.limits.max_streams,
                  "sessions and calls of one connection at a time")
      ->capture_default_str();
  command
      .add_option("--idle-timeout", flags->idle_seconds,
                  "seconds after which a session that asks for nothing is ended; 0: never")
      ->capture_default_str();
  command.add_flag("--reflection", flags->server.reflection,
                   "tell anyone who asks which services and messages there are");
  command
      .add_option("--max-top-k", flags->engine.max_top_k,
                  "rows per KV head that a query may ask for")
      ->capture_default_str();
  command
      .add_option("--drain", flags->drain_seconds,
                  "seconds that open sessions have to finish after SIGTERM")
      ->capture_default_str();
  command
      .add_option("--scrub-rate", flags->scrub_mib,
                  "MiB per second at which all contexts are read again and checked, while no "
                  "request waits; 0: not at all")
      ->capture_default_str();
  flags->access.Declare(command);
  flags->observe.Declare(command);
  UseConfigFile(command);
  command.callback([flags, &chosen] { chosen = [flags] { return RunServe(*flags); }; });
}

}  // namespace carrel::tools
