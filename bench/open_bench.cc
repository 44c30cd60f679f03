// What: how soon a kvstore answers after it was started on a context that is not in memory, and how
//       much memory it takes while a decoder then goes through all layers. The context may be
//       larger than the machine's memory. The store's files are dropped from the page cache, then
//       this program starts itself anew: engine, server and client over a Unix socket. One JSON
//       object a line: cold, then warm; both must give the same replies.
// Usage: open_bench STORE CONTEXT [TOP_K [BUDGET_MIB [TOKENS]]]
#include <fcntl.h>
#include <spawn.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "bench/decoding_script.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/server.h"
#include "kvstore/storage/store.h"

extern char** environ;

namespace carrel::bench {
namespace {

namespace fs = std::filesystem;

struct Settings {
  std::string store, context;
  int64_t top_k = 128, budget_mib = 0, tokens = 8;
};

int64_t NowUs() {  // one clock for all processes
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Bytes of this process in memory, mapped files included.
int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0, resident = 0;
  statm >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

void DropFiles(const std::string& folder) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    (void)fdatasync(fd);
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
}

// A query of layer 0 must be at hand before the store is read.
absl::StatusOr<Script> Read(const Settings& settings) {
  ASSIGN_OR_RETURN(const auto store,
                   kvstore::Store::Open(settings.store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const auto context, store->OpenContext(settings.context));
  return ReadScript(*context);
}

// started_us: when the parent started this process. script_file: what the parent read of the
// script, queries as floats, for the first answer.
absl::Status Serve(const Settings& settings, int64_t started_us, const std::string& script_file) {
  Script script;
  int64_t steps = 0;
  std::ifstream file(script_file, std::ios::binary);
  size_t fields = 0;
  file >> script.shape.layers >> script.shape.q_heads >> script.shape.kv_heads >>
      script.shape.head_dim >> steps >> fields;
  script.fingerprint.resize(fields);
  for (auto& [name, value] : script.fingerprint) file >> std::quoted(name) >> std::quoted(value);
  file.get();
  const auto floats = static_cast<size_t>(script.shape.q_heads) * script.shape.head_dim;
  script.queries.assign(
      static_cast<size_t>(steps),
      std::vector<std::vector<float>>(script.shape.layers, std::vector<float>(floats)));
  for (auto& step : script.queries) {
    for (auto& layer : step) {
      file.read(reinterpret_cast<char*>(layer.data()),
                static_cast<std::streamsize>(floats * sizeof(float)));
    }
  }
  CARREL_CHECK(file.good());

  nlohmann::json since_start_ms;
  const auto mark = [&](const char* what) {
    since_start_ms[what] = static_cast<double>(NowUs() - started_us) / 1000;
  };
  mark("queries_read");
  kvstore::EngineConfig config;
  config.memory_budget_bytes = settings.budget_mib << 20;
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(settings.store, kvstore::StoreMode::kReadOnly));
  mark("store_open");
  ASSIGN_OR_RETURN(const auto engine, kvstore::Engine::Create(config, std::move(store)));
  kvstore::ServerConfig listen;
  listen.listen = {absl::StrCat("unix:", script_file, ".socket")};
  ASSIGN_OR_RETURN(const auto server, kvstore::Server::Start(listen, engine.get()));
  mark("server_up");
  ASSIGN_OR_RETURN(Decoding decoding, Decoding::Open(server->addresses()[0], settings.context,
                                                     settings.top_k, script));
  mark("session_open");
  ASSIGN_OR_RETURN(uint32_t crc, decoding.Ask(0, 0));
  const int64_t first_us = NowUs() - started_us;
  nlohmann::json json = {{"context", settings.context},
                         {"top_k", settings.top_k},
                         {"since_start_ms", since_start_ms},
                         {"first_answer_ms", static_cast<double>(first_us) / 1000}};
  int64_t peak = 0;
  std::vector<double> token_ms;
  for (int64_t token = 0; token < settings.tokens; ++token) {
    const int64_t begin = NowUs();
    for (int32_t layer = 0; layer < script.shape.layers; ++layer) {
      ASSIGN_OR_RETURN(const uint32_t reply, decoding.Ask(token % steps, layer));
      crc = crc * 31 + reply;
      peak = std::max(peak, ResidentBytes());
    }
    token_ms.push_back(static_cast<double>(NowUs() - begin) / 1000);
  }
  std::sort(token_ms.begin(), token_ms.end());
  const v1::StatisticsResponse statistics = engine->Statistics();
  json["layers"] = script.shape.layers;
  json["tokens"] = settings.tokens;
  json["ms_per_token_median"] = token_ms.empty() ? 0 : token_ms[token_ms.size() / 2];
  json["peak_resident_bytes"] = peak;
  json["memory_budget_bytes"] = statistics.memory_budget_bytes();
  json["layers_released"] = statistics.layers_released();
  json["layers_loaded"] = statistics.layers_loaded();
  json["bytes_sent_per_token"] =
      decoding.bytes_sent() / (settings.tokens * script.shape.layers + 1) * script.shape.layers;
  json["bytes_received_per_token"] =
      decoding.bytes_received() / (settings.tokens * script.shape.layers + 1) * script.shape.layers;
  json["replies_crc"] = crc;
  std::ofstream(script_file + ".json") << json.dump();
  return absl::OkStatus();
}

absl::StatusOr<nlohmann::json> Start(char** argv, const Settings& settings,
                                     const std::string& script_file) {
  std::vector<std::string> args = {"/proc/self/exe",
                                   settings.store,
                                   settings.context,
                                   absl::StrCat(settings.top_k),
                                   absl::StrCat(settings.budget_mib),
                                   absl::StrCat(settings.tokens),
                                   absl::StrCat(NowUs()),
                                   script_file};
  std::vector<char*> pointers;
  for (std::string& arg : args) pointers.push_back(arg.data());
  pointers[0] = argv[0];
  pointers.push_back(nullptr);
  pid_t child = 0;
  if (const int error =
          posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, pointers.data(), environ);
      error != 0) {
    return ErrnoStatus(error, "posix_spawn");
  }
  int state = 0;
  if (waitpid(child, &state, 0) < 0 || !WIFEXITED(state) || WEXITSTATUS(state) != 0) {
    return absl::InternalError("the started process failed");
  }
  std::ifstream result(script_file + ".json");
  return nlohmann::json::parse(result);
}

absl::Status Run(char** argv, const Settings& settings) {
  char folder[] = "/tmp/carrel_open_XXXXXX";
  if (mkdtemp(folder) == nullptr) return ErrnoStatus(errno, "mkdtemp");
  struct Remove {
    std::string folder;
    ~Remove() { fs::remove_all(folder); }
  } remove{folder};
  const std::string script_file = absl::StrCat(folder, "/script");
  {
    ASSIGN_OR_RETURN(Script script, Read(settings));
    // No more than is asked: the started process reads them before its first answer.
    const auto asked = static_cast<size_t>(std::max<int64_t>(1, settings.tokens));
    script.queries.resize(std::min(script.queries.size(), asked));
    std::ofstream file(script_file, std::ios::binary);
    file << script.shape.layers << ' ' << script.shape.q_heads << ' ' << script.shape.kv_heads
         << ' ' << script.shape.head_dim << ' ' << script.queries.size() << ' '
         << script.fingerprint.size();
    for (const auto& [name, value] : script.fingerprint) {
      file << ' ' << std::quoted(name) << ' ' << std::quoted(value);
    }
    file << '\n';
    for (const auto& step : script.queries) {
      for (const auto& layer : step) {
        file.write(reinterpret_cast<const char*>(layer.data()),
                   static_cast<std::streamsize>(layer.size() * sizeof(float)));
      }
    }
  }
  nlohmann::json first;
  for (const char* state : {"cold", "warm"}) {
    if (std::string(state) == "cold") DropFiles(settings.store);
    ASSIGN_OR_RETURN(nlohmann::json json, Start(argv, settings, script_file));
    json["files"] = state;
    std::printf("%s\n", json.dump().c_str());
    std::fflush(stdout);
    if (first.is_null()) first = json;
    if (first["replies_crc"] != json["replies_crc"]) {
      return absl::InternalError("cold and warm replies differ");
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace carrel::bench

int main(int argc, char** argv) {
  spdlog::set_level(spdlog::level::err);
  carrel::bench::Settings settings;
  bool usable = argc >= 3 && argc <= 8;
  if (usable) {
    settings.store = argv[1];
    settings.context = argv[2];
    usable = (argc <= 3 || (absl::SimpleAtoi(argv[3], &settings.top_k) && settings.top_k > 0)) &&
             (argc <= 4 ||
              (absl::SimpleAtoi(argv[4], &settings.budget_mib) && settings.budget_mib >= 0)) &&
             (argc <= 5 || (absl::SimpleAtoi(argv[5], &settings.tokens) && settings.tokens >= 0));
  }
  if (!usable) {
    std::fprintf(stderr, "usage: open_bench STORE CONTEXT [TOP_K [BUDGET_MIB [TOKENS]]]\n");
    return 2;
  }
  int64_t started_us = 0;
  const bool child = argc == 8 && absl::SimpleAtoi(argv[6], &started_us);
  const absl::Status status = child ? carrel::bench::Serve(settings, started_us, argv[7])
                                    : carrel::bench::Run(argv, settings);
  if (status.ok()) return 0;
  std::fprintf(stderr, "open_bench: %s\n", status.ToString().c_str());
  return 1;
}
