// What: many decoding sessions on one context, over a Unix socket: throughput and latency, closed
//       loop and at half of that load, each reply compared with the one that a single session got.
//       Or, with an address, of a server that is there, at a given rate (bench/publishing).
//       One JSON object a line.
#include <spdlog/spdlog.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "bench/decoding_script.h"
#include "carrel/v1/context.pb.h"
#include "common/scheduling.h"
#include "common/status.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/server.h"
#include "kvstore/storage/store.h"

namespace carrel {
namespace {

using Clock = std::chrono::steady_clock;
using bench::Decoding;
using bench::ReadScript;
using bench::Script;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

struct Settings {
  std::string store, context;
  int64_t top_k = 128;
  double seconds = 3;
  std::vector<int> sessions = {1, 4, 16, 64};
  std::string address;      // of a server; empty: one of its own
  double tokens_per_s = 0;  // of each session, at that server
};

struct Load {
  std::vector<double> us;  // of each query
  int64_t tokens = 0, refused = 0, wrong = 0, failed = 0;
  double seconds = 0;
};

// tokens_per_s: of each session; 0: the next token as soon as one is done.
Load Run(const std::string& address, const Settings& settings, const Script& script,
         const std::vector<std::vector<uint32_t>>& truth, int sessions, double tokens_per_s) {
  std::vector<Load> loads(static_cast<size_t>(sessions));
  std::vector<std::thread> threads;
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  for (int s = 0; s < sessions; ++s) {
    threads.emplace_back([&, s] {
      Load& load = loads[static_cast<size_t>(s)];
      absl::StatusOr<Decoding> session =
          Decoding::Open(address, settings.context, settings.top_k, script);
      ++ready;
      if (!session.ok()) {
        // Opening is work for the engine too, and may find its queue full.
        const bool refused = absl::IsResourceExhausted(session.status());
        ++(refused ? load.refused : load.failed);
        if (!refused) {
          std::fprintf(stderr, "session %d: %s\n", s, session.status().ToString().c_str());
        }
        return;
      }
      while (!go) std::this_thread::yield();
      std::mt19937_64 rng(static_cast<uint64_t>(s));
      std::exponential_distribution<double> gap(tokens_per_s > 0 ? tokens_per_s : 1);
      const auto start = Clock::now();
      auto due = start;
      for (auto step = static_cast<int64_t>(s); Seconds(Clock::now() - start) < settings.seconds;
           ++step) {
        if (tokens_per_s > 0) {
          due +=
              std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(gap(rng)));
          std::this_thread::sleep_until(due);
        }
        const auto at = static_cast<int64_t>(static_cast<size_t>(step) % script.queries.size());
        for (int32_t layer = 0; layer < script.shape.layers; ++layer) {
          const auto asked = Clock::now();
          const absl::StatusOr<uint32_t> crc = session->Ask(at, layer);
          load.us.push_back(1e6 * Seconds(Clock::now() - asked));
          if (absl::IsResourceExhausted(crc.status())) {
            ++load.refused;
          } else if (!crc.ok()) {
            std::fprintf(stderr, "%s\n", crc.status().ToString().c_str());
            ++load.failed;
          } else if (!truth.empty() &&
                     *crc != truth[static_cast<size_t>(at)][static_cast<size_t>(layer)]) {
            ++load.wrong;
          }
        }
        ++load.tokens;
      }
    });
  }
  while (ready < sessions) std::this_thread::yield();
  const auto start = Clock::now();
  go = true;
  for (std::thread& thread : threads) thread.join();
  Load all;
  all.seconds = Seconds(Clock::now() - start);
  for (Load& load : loads) {
    all.us.insert(all.us.end(), load.us.begin(), load.us.end());
    all.tokens += load.tokens;
    all.refused += load.refused;
    all.wrong += load.wrong;
    all.failed += load.failed;
  }
  std::sort(all.us.begin(), all.us.end());
  return all;
}

nlohmann::json ToJson(const char* what, const Settings& settings, int sessions, const Load& load) {
  const auto at = [&](double share) {
    return load.us.empty() ? 0.0
                           : load.us[std::min(
                                 load.us.size() - 1,
                                 static_cast<size_t>(share * static_cast<double>(load.us.size())))];
  };
  return {{"load", what},
          {"context", settings.context},
          {"sessions", sessions},
          {"top_k", settings.top_k},
          {"tokens_per_s", static_cast<double>(load.tokens) / load.seconds},
          {"queries", load.us.size()},
          {"p50_us", at(0.5)},
          {"p90_us", at(0.9)},
          {"p99_us", at(0.99)},
          {"wrong", load.wrong},
          {"refused", load.refused},
          {"failed", load.failed}};
}

// What each query is answered, one session asking alone.
std::vector<std::vector<uint32_t>> Truth(const std::string& address, const Settings& settings,
                                         const Script& script) {
  std::vector<std::vector<uint32_t>> truth(script.queries.size());
  absl::StatusOr<Decoding> alone =
      Decoding::Open(address, settings.context, settings.top_k, script);
  if (!alone.ok()) std::fprintf(stderr, "%s\n", alone.status().ToString().c_str());
  CARREL_CHECK(alone.ok());
  for (size_t step = 0; step < truth.size(); ++step) {
    for (int32_t layer = 0; layer < script.shape.layers; ++layer) {
      const absl::StatusOr<uint32_t> crc = alone->Ask(static_cast<int64_t>(step), layer);
      CARREL_CHECK(crc.ok());
      truth[step].push_back(*crc);
    }
  }
  return truth;
}

absl::StatusOr<Script> ScriptOf(const Settings& settings) {
  ASSIGN_OR_RETURN(const auto store,
                   kvstore::Store::Open(settings.store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const auto context, store->OpenContext(settings.context));
  return ReadScript(*context);
}

absl::Status RunAt(const Settings& settings) {
  ASSIGN_OR_RETURN(const Script script, ScriptOf(settings));
  const auto truth = Truth(settings.address, settings, script);
  int64_t wrong = 0;
  for (const int sessions : settings.sessions) {
    const Load load =
        Run(settings.address, settings, script, truth, sessions, settings.tokens_per_s);
    std::printf("%s\n", ToJson("random arrivals", settings, sessions, load).dump().c_str());
    wrong += load.wrong + load.failed;
  }
  if (wrong == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(wrong, " replies were wrong or failed"));
}

absl::Status RunAll(const Settings& settings) {
  char folder[] = "/tmp/carrel_load_XXXXXX";
  if (mkdtemp(folder) == nullptr) return ErrnoStatus(errno, "mkdtemp");
  struct Remove {
    std::string folder;
    ~Remove() { std::filesystem::remove_all(folder); }
  } remove{folder};
  const auto serve = [&](const kvstore::EngineConfig& config, const std::string& name,
                         auto&& body) -> absl::Status {
    ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Store> store,
                     kvstore::Store::Open(settings.store, kvstore::StoreMode::kReadOnly));
    ASSIGN_OR_RETURN(const auto engine, kvstore::Engine::Create(config, std::move(store)));
    kvstore::ServerConfig listen;
    listen.listen = {absl::StrCat("unix:", folder, "/", name)};
    ASSIGN_OR_RETURN(const auto server, kvstore::Server::Start(listen, engine.get()));
    body(server->addresses()[0], *engine);
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const Script script, ScriptOf(settings));
  int64_t wrong = 0;
  RETURN_IF_ERROR(serve({}, "s", [&](const std::string& address, kvstore::Engine& engine) {
    const auto truth = Truth(address, settings, script);
    for (const int sessions : settings.sessions) {
      const Load full = Run(address, settings, script, truth, sessions, 0);
      nlohmann::json json = ToJson("closed loop", settings, sessions, full);
      json["resident_bytes"] = engine.Statistics().resident_bytes();
      std::printf("%s\n", json.dump().c_str());
      const double half = static_cast<double>(full.tokens) / full.seconds / 2 / sessions;
      const Load paced = Run(address, settings, script, truth, sessions, half);
      std::printf(
          "%s\n",
          ToJson("half of that, random arrivals", settings, sessions, paced).dump().c_str());
      std::fflush(stdout);
      wrong += full.wrong + full.failed + paced.wrong + paced.failed;
    }
    // Overload: room for few requests; what is answered is still right.
    kvstore::EngineConfig small;
    small.queue_limit = 4;
    const absl::Status overload =
        serve(small, "o", [&](const std::string& crowded, kvstore::Engine&) {
          const Load load = Run(crowded, settings, script, truth, 64, 0);
          std::printf("%s\n", ToJson("queue of 4", settings, 64, load).dump().c_str());
          wrong += load.wrong + load.failed;
        });
    CARREL_CHECK(overload.ok());
  }));
  if (wrong > 0) {
    return absl::InternalError(
        absl::StrCat(wrong, " replies were wrong or failed for another reason than overload"));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace carrel

int main(int argc, char** argv) {
  spdlog::set_level(spdlog::level::warn);
  carrel::WakeSoon();  // what is measured is the server; a client elsewhere has its own cores
  carrel::Settings settings;
  const auto usage = [] {
    std::fprintf(stderr,
                 "usage: load_bench STORE CONTEXT [TOP_K [SECONDS [SESSIONS,SESSIONS,... [ADDRESS "
                 "TOKENS_PER_S]]]]\n");
    return 2;
  };
  if (argc < 3 || argc == 7 || argc > 8) return usage();
  settings.store = argv[1];
  settings.context = argv[2];
  if (argc > 3 && (!absl::SimpleAtoi(argv[3], &settings.top_k) || settings.top_k < 1)) {
    return usage();
  }
  if (argc > 4 && (!absl::SimpleAtod(argv[4], &settings.seconds) || settings.seconds <= 0)) {
    return usage();
  }
  if (argc > 5) {
    settings.sessions.clear();
    for (const absl::string_view part : absl::StrSplit(argv[5], ',')) {
      int count = 0;
      if (!absl::SimpleAtoi(part, &count) || count < 1) return usage();
      settings.sessions.push_back(count);
    }
  }
  if (argc > 7) {
    settings.address = argv[6];
    if (!absl::SimpleAtod(argv[7], &settings.tokens_per_s) || settings.tokens_per_s <= 0) {
      return usage();
    }
  }
  const absl::Status status =
      settings.address.empty() ? carrel::RunAll(settings) : carrel::RunAt(settings);
  if (status.ok()) return 0;
  std::fprintf(stderr, "load_bench: %s\n", status.ToString().c_str());
  return 1;
}
