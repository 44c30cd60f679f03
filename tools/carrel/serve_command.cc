#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/freed_memory.h"
#include "common/metrics.h"
#include "common/scheduling.h"
#include "common/status.h"
#include "common/usable_cores.h"
#include "kvstore/access/access.h"
#include "kvstore/access/audit_log.h"
#include "kvstore/engine/engine.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/replica/residence_metrics.h"
#include "kvstore/service/metrics_listener.h"
#include "kvstore/service/metrics_text.h"
#include "kvstore/service/server.h"
#include "kvstore/service/supervisor.h"
#include "kvstore/storage/store.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/config_file.h"
#include "tools/carrel/log_format.h"
#include "tools/carrel/replica_flags.h"
#include "tools/carrel/signal_pipe.h"

namespace carrel::tools {
namespace {

// Who may do what: keys, TLS, the audit log.
struct AccessFlags {
  std::string keys;
  TlsFiles tls;
  bool insecure = false;
  std::string socket_mode = "0600";  // octal
  std::string audit_log;
};

struct ServeFlags {
  std::string folder;
  ReplicaFlags replica;
  kvstore::ServerConfig server;
  AccessFlags access;
  kvstore::EngineConfig engine;
  std::string metrics;  // "HOST:PORT" or "PORT"; empty: no port
  LogFlags log;
  bool read_only = false;
  int64_t memory_mib = 0;
  // A terabyte in 17 hours, at a thousandth of a core.
  int64_t scrub_mib = 16;
  int64_t request_mib = 0;
  double drain_seconds = 30;
  double idle_seconds = 600;
  std::string keep_imports = "168h";
};

absl::Status CheckSeconds(const char* flag, double seconds) {
  if (seconds >= 0 && seconds <= 86400) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, "=", seconds, " s is outside [0, 86400]"));
}

absl::StatusOr<int64_t> SecondsToKeepImports(const std::string& text) {
  absl::Duration time;
  const bool parsed = absl::ParseDuration(text, &time);
  if (parsed && time == absl::ZeroDuration()) return 0;
  if (!parsed || time < absl::Seconds(1) || time > absl::Hours(24 * 3660)) {
    return absl::InvalidArgumentError(
        absl::StrCat("keep-imports=", text, " is neither 0 nor a duration from 1s to 87840h"));
  }
  return absl::ToInt64Seconds(time);
}

constexpr absl::Duration kWatch = absl::Seconds(10), kProbe = absl::Seconds(5);
constexpr int kExitUnanswering = 3;

// A server whose listener or gRPC is stuck looks alive to everyone but its clients. What it holds is
// lost in any case; a supervisor starts another.
[[noreturn]] void GiveUp(const absl::Status& status) {
  absl::FPrintF(stderr,
                "carrel serve: %d probes of this server failed, the last with %s: it ends\n",
                kvstore::Watchdog::kFailures, status.ToString());
  _exit(kExitUnanswering);
}

// Until the running sessions have ended, or a second signal came.
void Drain(kvstore::Server& server, const SignalPipe& signals, absl::Duration wait) {
  std::thread drain([&] {
    server.Drain(wait);
    signals.Wake();
  });
  for (int signal = signals.Wait(); signal != 0; signal = signals.Wait()) {
    if (signal == SIGHUP) continue;
    absl::FPrintF(stderr, "carrel serve: %s again: sessions are cut\n", strsignal(signal));
    server.HurryUp();
  }
  drain.join();
}

// SIGHUP: a log that was renamed is begun anew, the keys are read at once, and of a read-only store
// what was published since is seen.
void ReadAgain(const ServeFlags& flags, kvstore::AuditLog* audit, kvstore::Engine& engine) {
  if (const absl::Status status = engine.Refresh(); !status.ok()) {
    absl::FPrintF(stderr, "carrel serve: SIGHUP: %s\n", status.ToString());
  }
  if (audit != nullptr) {
    if (const absl::Status status = audit->Reopen(); !status.ok()) {
      absl::FPrintF(stderr, "carrel serve: SIGHUP: %s; lines go on to where they went\n",
                    status.message());
    }
  }
  if (flags.server.access != nullptr) flags.server.access->Reload().IgnoreError();  // it logs
}

void BoundHeaps() {
  ReturnFreedMemory();
  rlimit address_space{};
  if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY) {
    UseFewHeaps();
  }
}

// What is of Unix sockets, or of TCP alone, needs one to be of use.
absl::Status CheckListeners(const ServeFlags& flags, bool socket_mode_given) {
  bool unix_socket = false, tcp = false;
  for (const std::string& address : flags.server.listen) {
    (absl::StartsWith(address, "unix:") ? unix_socket : tcp) = true;
  }
  if (socket_mode_given && !unix_socket) {
    return absl::InvalidArgumentError("--socket-mode changes nothing: no --listen is unix:PATH");
  }
  if (!flags.access.tls.certificate.empty() && !tcp) {
    return absl::InvalidArgumentError(
        "--tls-cert changes nothing: every --listen is a Unix socket, where there is no TLS");
  }
  return absl::OkStatus();
}

// Numbers of flags into those of engine and server.
absl::Status ResolveNumbers(ServeFlags& flags) {
  if (flags.memory_mib < 0 || flags.memory_mib > (int64_t{1} << 30)) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory-budget=", flags.memory_mib, " MiB is outside [0, 1073741824]"));
  }
  flags.engine.memory_budget_bytes = flags.memory_mib << 20;
  if (flags.request_mib < 0 || flags.request_mib > (int64_t{1} << 30)) {
    return absl::InvalidArgumentError(
        absl::StrCat("request-budget=", flags.request_mib, " MiB is outside [0, 1073741824]"));
  }
  flags.engine.request_budget_bytes = flags.request_mib << 20;
  RETURN_IF_ERROR(CheckSeconds("drain", flags.drain_seconds));
  RETURN_IF_ERROR(CheckSeconds("idle-timeout", flags.idle_seconds));
  flags.server.limits.idle_timeout =
      flags.idle_seconds == 0 ? absl::InfiniteDuration() : absl::Seconds(flags.idle_seconds);
  if (flags.scrub_mib < 0 || flags.scrub_mib > (int64_t{1} << 14)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scrub-rate=", flags.scrub_mib, " MiB/s is outside [0, 16384]"));
  }
  flags.engine.scrub_bytes_per_s = flags.scrub_mib << 20;
  ASSIGN_OR_RETURN(flags.engine.import_age_s, SecondsToKeepImports(flags.keep_imports));
  return absl::OkStatus();
}

absl::StatusOr<uint32_t> ParseMode(const std::string& text) {
  uint32_t mode = 0;
  for (const char c : text) {
    if (c < '0' || c > '7' || mode > 0777) mode = 01000;
    mode = mode * 8 + static_cast<uint32_t>(c - '0');
  }
  if (!text.empty() && mode <= 0777) return mode;
  return absl::InvalidArgumentError(
      absl::StrCat("socket-mode=", text.substr(0, 32), " is no octal mode in 0 .. 0777"));
}

// Into the server's configuration; the audit log outlives it. Null: none is wanted.
absl::StatusOr<std::unique_ptr<kvstore::AuditLog>> ApplyAccess(const AccessFlags& flags,
                                                               kvstore::ServerConfig& config) {
  ASSIGN_OR_RETURN(config.socket_mode, ParseMode(flags.socket_mode));
  config.tls = flags.tls;
  config.insecure = flags.insecure;
  if (!flags.keys.empty()) {
    ASSIGN_OR_RETURN(config.access, kvstore::Access::Create(flags.keys));
  }
  std::unique_ptr<kvstore::AuditLog> log;
  if (!flags.audit_log.empty()) {
    ASSIGN_OR_RETURN(log, kvstore::AuditLog::Open(flags.audit_log));
  }
  config.audit = log.get();
  return log;
}

// Where Prometheus scrapes; null: nowhere. Engine, server and residence (may be null) outlive it.
absl::StatusOr<std::unique_ptr<kvstore::MetricsListener>> Listen(
    const std::string& metrics, kvstore::Engine* engine, kvstore::Server* server,
    const kvstore::Residence* residence) {
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

absl::Status RunServe(ServeFlags& flags) {
  RETURN_IF_ERROR(flags.replica.Resolve(flags.read_only, flags.folder));
  if (flags.folder.empty()) {
    return absl::InvalidArgumentError("serve: --store, or --remote, is required");
  }
  RETURN_IF_ERROR(SetUpLog(flags.log));
  RETURN_IF_ERROR(ResolveNumbers(flags));
  BoundHeaps();
  WakeSoon();  // of all that is started from here on
  ASSIGN_OR_RETURN(const SignalPipe signals, SignalPipe::Catch({SIGTERM, SIGINT, SIGHUP}));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::AuditLog> audit,
                   ApplyAccess(flags.access, flags.server));
  ASSIGN_OR_RETURN(
      std::unique_ptr<kvstore::Store> store,
      kvstore::Store::Open(flags.folder, flags.read_only ? kvstore::StoreMode::kReadOnly
                                                         : kvstore::StoreMode::kReadWrite));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Engine> engine,
                   kvstore::Engine::Create(flags.engine, std::move(store)));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Residence> residence,
                   flags.replica.Start(*engine));
  flags.server.source = residence.get();
  flags.server.ready_later = !flags.replica.warm.empty();
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Server> server,
                   kvstore::Server::Start(flags.server, engine.get()));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::MetricsListener> metrics,
                   Listen(flags.metrics, engine.get(), server.get(), residence.get()));
  std::unique_ptr<kvstore::Warming> warming =
      flags.replica.StartWarming(residence.get(), [&server] {
        absl::FPrintF(stderr, "carrel serve: what --warm names is here\n");
        server->SetReady();
      });
  absl::FPrintF(stderr,
                "carrel serve: %s%s ready on %s; memory budget %d MiB, and %d MiB for "
                "requests, %d threads, queue of %d, %d connections of %d file "
                "descriptors\n",
                flags.folder,
                flags.read_only         ? " (read-only)"
                : flags.replica.given() ? absl::StrCat(" of ", flags.replica.remote)
                                        : "",
                absl::StrJoin(server->addresses(), " "), engine->config().memory_budget_bytes >> 20,
                engine->config().request_budget_bytes >> 20,
                flags.engine.search_threads > 0 ? flags.engine.search_threads : UsableCores(),
                flags.engine.queue_limit, server->statistics().max_connections,
                server->statistics().max_descriptors);
  if (metrics != nullptr) {
    absl::FPrintF(stderr, "carrel serve: metrics on http://%s/metrics\n", metrics->address());
  }
  auto watchdog = std::make_unique<kvstore::Watchdog>(
      kvstore::WatchdogPeriod(kWatch), [&] { return server->Probe(kProbe); }, &GiveUp);
  kvstore::NotifySupervisor("READY=1");
  int signal = signals.Wait();
  for (; signal == SIGHUP; signal = signals.Wait()) ReadAgain(flags, audit.get(), *engine);
  watchdog = nullptr;
  warming = nullptr;
  kvstore::NotifySupervisor("STOPPING=1");
  absl::FPrintF(stderr,
                "carrel serve: %s: no new sessions, waiting up to %.0f s for %d open ones\n",
                strsignal(signal), flags.drain_seconds, engine->sessions());
  if (residence != nullptr) residence->End();  // nobody waits for a bucket any more
  Drain(*server, signals, absl::Seconds(flags.drain_seconds));
  absl::FPrintF(stderr, "carrel serve: stopped\n");
  return absl::OkStatus();
}

// Who may do what, and what operators are told.
void DeclareAccess(CLI::App& command, ServeFlags& serve) {
  AccessFlags& flags = serve.access;
  command.add_option(
      "--keys", flags.keys,
      "file that says who may do what (docs/trust.md); read again when it changes; see "
      "carrel keys. Without: a Unix socket's callers may do all, others list and open");
  command.add_option("--tls-cert", flags.tls.certificate,
                     "TLS on TCP addresses: certificate chain; read again when it changes");
  command.add_option("--tls-key", flags.tls.key, "key of --tls-cert");
  command.add_option("--tls-client-ca", flags.tls.ca,
                     "clients must have a certificate of one of these authorities");
  command.add_flag(
      "--insecure", flags.insecure,
      "listen where others than this machine can reach it, although TLS or credentials "
      "(--keys or --tls-client-ca) are missing");
  command.add_option("--socket-mode", flags.socket_mode, "mode of Unix sockets' files, octal");
  command.add_option("--audit-log", flags.audit_log,
                     "file to which one JSON line is appended per session, deletion and denial; "
                     "opened again on SIGHUP");
  command.add_option("--metrics", serve.metrics,
                     "HOST:PORT or PORT (on 127.0.0.1) where Prometheus finds /metrics; names of "
                     "contexts and keys are seen there; not given: nowhere");
  command.add_option("--log-format", serve.log.format, "text or json: one object a line");
  command.add_option("--log-level", serve.log.level, "trace, debug, info, warning, error or off");
}

}  // namespace

void AddServe(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<ServeFlags>();
  CLI::App& command = *app.add_subcommand(
      "serve", "Answer decoders' queries over the contexts of a store, until SIGTERM or SIGINT");
  command.add_option("--store", flags->folder, "folder of the store");
  flags->replica.Declare(command);
  command.add_option("--listen", flags->server.listen,
                     "unix:PATH or HOST:PORT (port 0: any free one); may be repeated");
  command.add_option("--threads", flags->engine.search_threads,
                     "threads that search; 0: one per core");
  command.add_option(
      "--memory-budget", flags->memory_mib,
      "MiB that the process may hold of the store: loaded indexes and mapped pages of "
      "rows and codes; 0: half of what the machine, control group or ulimit allow");
  command.add_option("--request-budget", flags->request_mib,
                     "MiB that clients may make the process hold beside that: requests, results, "
                     "replies that wait; 0: a quarter of the memory budget, at least 64");
  command.add_flag("--read-only", flags->read_only,
                   "take no lock and write nothing: several may serve a store, also on read-only "
                   "media, and what another process publishes meanwhile is seen");
  command.add_option("--queue", flags->engine.queue_limit,
                     "requests that may wait; one more is refused");
  command.add_option("--max-open-contexts", flags->engine.max_open_contexts, "contexts kept open");
  command.add_option("--max-sessions", flags->engine.max_sessions, "decoders at a time");
  command.add_option(
      "--max-sessions-per-peer", flags->server.limits.max_sessions_per_peer,
      "decoders of one IP address, or of all that come over Unix sockets; 0: as many as "
      "--max-sessions");
  command.add_option(
      "--max-connections", flags->server.limits.max_connections,
      "connections at a time; 0: 4096, or what the limit of file descriptors leaves");
  command.add_option("--max-streams", flags->server.limits.max_streams,
                     "sessions and calls of one connection at a time");
  command.add_option("--idle-timeout", flags->idle_seconds,
                     "seconds after which a session that asks for nothing is ended; 0: never");
  command.add_option(
      "--advertise", flags->server.advertise,
      "unix:PATH or HOST:PORT by which decoders reach this very server, told to those "
      "that came through a router (Locate)");
  command.add_flag("--reflection", flags->server.reflection,
                   "tell anyone who asks which services and messages there are");
  command.add_option("--max-top-k", flags->engine.max_top_k,
                     "rows per KV head that a query may ask for");
  command.add_option("--drain", flags->drain_seconds,
                     "seconds that open sessions have to finish after SIGTERM");
  command.add_option("--scrub-rate", flags->scrub_mib,
                     "MiB per second at which all contexts are read again and checked, while no "
                     "request waits; 0: not at all");
  command.add_option("--keep-imports", flags->keep_imports,
                     "how long what an interrupted import left waits for somebody to go on; 0: for "
                     "ever");
  DeclareAccess(command, *flags);
  UseConfigFile(command);
  command.callback([flags, &chosen, &command] {
    const bool socket_mode_given = command.get_option("--socket-mode")->count() > 0;
    chosen = [flags, socket_mode_given]() -> absl::Status {
      RETURN_IF_ERROR(CheckListeners(*flags, socket_mode_given));
      return RunServe(*flags);
    };
  });
}

}  // namespace carrel::tools
