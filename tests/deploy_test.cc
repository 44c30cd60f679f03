// What operators get: the configuration, the unit, the manifests and the alerts of deploy/ are tried
// where they can be, and /metrics is read by Prometheus itself. Tools that are not installed skip
// their test (./run test installs them).
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/test_folders.h"
#include "common/version.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct Ran {
  int code = -1;
  std::string output;  // both streams
};

Ran Shell(const std::string& command) {
  Ran ran;
  FILE* pipe = popen(absl::StrCat("( ", command, " ) 2>&1").c_str(), "r");
  if (pipe == nullptr) return ran;
  std::array<char, 4096> buffer;
  for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    ran.output.append(buffer.data(), n);
  }
  const int status = pclose(pipe);
  ran.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ran;
}

bool Has(const std::string& tool) { return Shell("command -v " + tool).code == 0; }
#define NEEDS(tool) \
  if (!Has(tool)) GTEST_SKIP() << tool << " is not installed"

std::string Deploy(const std::string& file) { return SourceFolder() + "/deploy/" + file; }

// Bash opens the connection: no HTTP client of ours is part of this.
std::string Get(const std::string& address, const std::string& target) {
  const std::vector<std::string> parts = absl::StrSplit(address, ':');
  const Ran ran = Shell(absl::StrCat(
      "exec timeout 10 bash -c 'exec 3<>/dev/tcp/", parts[0], "/", parts[1],
      "; printf \"GET %s HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n\" \"", target, "\" >&3; cat <&3'"));
  const size_t body = ran.output.find("\r\n\r\n");
  return body == std::string::npos ? "" : ran.output.substr(body + 4);
}

std::set<std::string> NamesIn(const std::string& text) {
  static const std::regex name("\\b(carrel|process)_[a-z0-9_]+");
  std::set<std::string> names;
  for (std::sregex_iterator it(text.begin(), text.end(), name), end; it != end; ++it) {
    names.insert(it->str());
  }
  return names;
}

class DeployTest : public StoreTest {
 protected:
  // serve --config deploy/carrel.toml, with what a test cannot use as it is changed by the environment.
  std::unique_ptr<Process> Serve(const Args& more = {}) {
    Command command;
    command.args = With({"serve", "--config", Deploy("carrel.toml")}, more);
    command.environment = {{"CARREL_SERVE_STORE", store_},
                           {"CARREL_SERVE_LISTEN", "unix:" + SocketPath()},
                           {"CARREL_SERVE_METRICS", "0"}};
    auto process = Process::Start(command);
    EXPECT_TRUE(
        WaitUntil([&] { return !process->Running() || !MetricsAddress(*process).empty(); }));
    EXPECT_TRUE(process->Running()) << process->err();
    return process;
  }
  static std::string MetricsAddress(const Process& process) {
    static const std::regex pattern("metrics on http://([0-9.:]+)/metrics");
    const std::string err = process.err();
    std::smatch match;
    return std::regex_search(err, match, pattern) ? match[1].str() : "";
  }
};

TEST_F(DeployTest, Config_OfTheFolderServesAndTheEnvironmentComesBeforeIt) {
  const auto server = Serve();
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", "unix:" + SocketPath()})).out, answer_);
  const std::string metrics = Get(MetricsAddress(*server), "/metrics");
  // The file's memory-budget of 4096 MiB.
  EXPECT_THAT(metrics, testing::HasSubstr(
                           absl::StrCat("carrel_memory_budget_bytes ", int64_t{4096} << 20, "\n")));
  server->Signal(SIGTERM);
  EXPECT_EQ(server->Wait().exit_code, 0);
}

TEST_F(DeployTest, Config_TheCommandLineComesBeforeTheEnvironment) {
  const auto server = Serve({"--memory-budget", "512"});
  EXPECT_THAT(
      Get(MetricsAddress(*server), "/metrics"),
      testing::HasSubstr(absl::StrCat("carrel_memory_budget_bytes ", int64_t{512} << 20, "\n")));
}

TEST_F(DeployTest, Config_WhatIsUnknownOrWrongIsRefused) {
  const auto serve = [&](const std::string& text) {
    return Carrel({"serve", "--config", WriteFile("c.toml", text)});
  };
  EXPECT_THAT(serve("[serve]\nstore = \"x\"\nmax-sesions = 3\n"),
              FailsWith(2, Texts{"c.toml: no such setting in [serve]: max-sesions",
                                 "did you mean max-sessions?"}));
  EXPECT_THAT(serve("[serv]\nstore = \"x\"\n"),
              FailsWith(2, Texts{"c.toml", "no command serv", "did you mean serve?"}));
  EXPECT_THAT(serve("[serve]\nstore = \"x\"\nmax-sessions = \"many\"\n"),
              FailsWith(2, Texts{"max-sessions"}));
  EXPECT_THAT(serve("[serve]\nlog-format = \"xml\"\nstore = \"x\"\n"),
              FailsWith(2, Texts{"xml", "json"}));
  EXPECT_THAT(serve(""), FailsWith(2, Texts{"--store"}));
  EXPECT_THAT(Carrel({"serve", "--config", path("none.toml"), "--store", store_}),
              FailsWith(2, Texts{"none.toml"}));
}

// Of the environment, too: compose sets everything there.
TEST_F(DeployTest, Environment_WhatIsUnknownIsRefused) {
  const auto serve = [&](const std::string& name, const std::string& value) {
    Command command;
    command.args = {"serve", "--store", store_, "--listen", "unix:" + SocketPath()};
    command.environment = {{name, value}};
    return Carrel(command);
  };
  EXPECT_THAT(serve("CARREL_SERVE_MAX_SESIONS", "3"),
              FailsWith(2, Texts{"CARREL_SERVE_MAX_SESIONS", "no such setting",
                                 "did you mean CARREL_SERVE_MAX_SESSIONS?"}));
  EXPECT_THAT(serve("CARREL_SERVE_PORT", "50051"), FailsWith(2, Texts{"CARREL_SERVE_PORT"}));
  EXPECT_THAT(serve("CARREL_SERVE_", "1"), FailsWith(2, Texts{"CARREL_SERVE_"}));
  Command ask;
  ask.args = Ask(kKept);
  ask.environment = {{"CARREL_ASK_TEMPERATURE", "1"}};
  EXPECT_THAT(Carrel(ask), FailsWith(2, Texts{"CARREL_ASK_TEMPERATURE",
                                              "takes nothing from the "
                                              "environment"}));
  ask.environment = {{"CARREL_SERVE_MAX_SESIONS", "3"}, {"CARREL_PORT", "tcp://10.0.0.7:1"}};
  EXPECT_EQ(Carrel(ask).out, answer_);  // another command's
}

TEST_F(DeployTest, Logs_InJsonAreOneObjectALine) {
  const auto server = Serve();
  ASSERT_TRUE(WaitUntil([&] { return absl::StrContains(server->err(), "\"message\""); }))
      << server->err();
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", "unix:" + SocketPath()})).out, answer_);
  EXPECT_TRUE(WaitUntil([&] { return absl::StrContains(server->err(), "opened context=kept"); }))
      << server->err();
  int objects = 0;
  for (const absl::string_view line : absl::StrSplit(server->err(), '\n')) {
    if (line.empty() || line[0] != '{') continue;
    const json object = json::parse(line.begin(), line.end(), nullptr, false);
    ASSERT_TRUE(object.is_object()) << line;
    for (const char* field : {"time", "level", "thread", "message"})
      EXPECT_TRUE(object.contains(field)) << line;
    ++objects;
  }
  EXPECT_GT(objects, 0);
}

// What Type=notify and WatchdogSec= of the unit wait for.
TEST_F(DeployTest, Supervisor_IsToldOfStartProbesAndStop) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const std::string socket_path = absl::StrCat("/tmp/carrel_notify_", getpid());
  std::strncpy(name.sun_path, socket_path.c_str(), sizeof(name.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  const timeval patience{60, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  const auto heard = [fd] {
    char text[100];
    return std::string(text, static_cast<size_t>(std::max<ssize_t>(0, recv(fd, text, 100, 0))));
  };
  setenv("NOTIFY_SOCKET", socket_path.c_str(), 1);
  setenv("WATCHDOG_USEC", "1000000", 1);
  const auto server = Serve();
  unsetenv("NOTIFY_SOCKET");
  unsetenv("WATCHDOG_USEC");
  EXPECT_EQ(heard(), "READY=1");
  EXPECT_EQ(heard(), "WATCHDOG=1");
  server->Signal(SIGTERM);
  std::string last = heard();
  while (last == "WATCHDOG=1") last = heard();
  EXPECT_EQ(last, "STOPPING=1");
  EXPECT_EQ(server->Wait().exit_code, 0);
  close(fd);
  unlink(socket_path.c_str());
}

TEST_F(DeployTest, Metrics_AreCleanAndComplete) {
  const auto server = Serve();
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", "unix:" + SocketPath()})).out, answer_);
  const std::string metrics = Get(MetricsAddress(*server), "/metrics");
  EXPECT_THAT(
      metrics,
      testing::ContainsRegex(
          "carrel_request_searched_seconds_count\\{want=\"attend\",index=\"[a-z]+\"\\} [1-9]"));
  EXPECT_THAT(metrics, testing::HasSubstr("carrel_crc_failures_total 0\n"));
  EXPECT_THAT(metrics, testing::HasSubstr("carrel_refusals_total{reason=\"queue\"} 0\n"));
  // Every name that an alert, the dashboard or the documentation uses is there.
  const std::set<std::string> exposed = NamesIn(metrics);
  for (const char* file :
       {"deploy/prometheus/alerts.yaml", "deploy/grafana/carrel.json", "docs/metrics.md"}) {
    for (const std::string& name : NamesIn(ReadBytes(SourceFolder() + "/" + file))) {
      // Of replicas and workers: tests/cluster/cluster_test.py has both.
      if (absl::StartsWith(name, "carrel_replica_") || absl::StartsWith(name, "carrel_worker_")) {
        continue;
      }
      EXPECT_TRUE(exposed.contains(name)) << file << " uses " << name;
    }
  }
  // And every name that is there is documented.
  const std::set<std::string> documented = NamesIn(ReadBytes(SourceFolder() + "/docs/metrics.md"));
  for (const absl::string_view line : absl::StrSplit(metrics, '\n')) {
    if (!absl::StartsWith(line, "# TYPE ")) continue;
    const std::string name(line.substr(7, line.find(' ', 7) - 7));
    EXPECT_TRUE(documented.contains(name)) << name << " is not in docs/metrics.md";
  }
  NEEDS("promtool");
  const Ran check = Shell("promtool check metrics <" + WriteFile("metrics.txt", metrics));
  EXPECT_EQ(check.code, 0) << check.output;
}

TEST_F(DeployTest, Prometheus_ScrapesIt) {
  NEEDS("prometheus");
  const auto server = Serve();
  const std::string config =
      absl::StrReplaceAll(ReadBytes(Deploy("prometheus/scrape.yaml")),
                          {{"carrel:9464", MetricsAddress(*server)},
                           {"15s", "1s"},
                           {"- alerts.yaml", "- " + Deploy("prometheus/alerts.yaml")}});
  const std::string file = WriteFile("prometheus.yml", config);
  const int port = 20000 + static_cast<int>(getpid() % 20000);
  const std::string address = absl::StrCat("127.0.0.1:", port);
  const Ran started = Shell(absl::StrCat(
      "prometheus --config.file=", file, " --storage.tsdb.path=", path("tsdb"),
      " --web.listen-address=", address, " >", path("prometheus.log"), " 2>&1 & echo $!"));
  const auto pid = static_cast<pid_t>(std::stol(started.output));
  std::string said;
  const bool up = WaitUntil([&] {
    said = Get(address, "/api/v1/query?query=carrel_sessions%7Bjob%3D%22carrel%22%7D");
    return absl::StrContains(said, "\"value\"");
  });
  const std::string rules = Get(address, "/api/v1/rules");
  kill(pid, SIGTERM);
  EXPECT_TRUE(up) << said << ReadBytes(path("prometheus.log"));
  EXPECT_THAT(rules, testing::HasSubstr("CarrelDamagedBytes"));
  WaitUntil([&] { return kill(pid, 0) != 0; }, absl::Seconds(10));
}

TEST(DeployFilesTest, Alerts_DoWhatTheirTestsSay) {
  NEEDS("promtool");
  for (const std::string& command :
       {"promtool check rules " + Deploy("prometheus/alerts.yaml"),
        "promtool check config " + Deploy("prometheus/scrape.yaml"),
        "promtool test rules " + Deploy("prometheus/alerts_test.yaml")}) {
    const Ran ran = Shell(command);
    EXPECT_EQ(ran.code, 0) << command << "\n" << ran.output;
  }
}

TEST(DeployFilesTest, Alerts_EachHasItsSectionInTheRunbook) {
  const std::string runbook = ReadBytes(SourceFolder() + "/docs/runbook.md");
  const std::string alerts = ReadBytes(Deploy("prometheus/alerts.yaml"));
  static const std::regex pattern("alert: (\\w+)");
  int count = 0;
  for (std::sregex_iterator it(alerts.begin(), alerts.end(), pattern), end; it != end;
       ++it, ++count) {
    EXPECT_THAT(runbook, testing::HasSubstr(absl::StrCat("### ", (*it)[1].str(), "\n")));
  }
  EXPECT_GE(count, 8);
}

// The unit with the program that was built: systemd looks whether it is there.
TEST(DeployFilesTest, Unit_IsValidAndConfined) {
  NEEDS("systemd-analyze");
  const std::string unit = FreshTempDir() + "/carrel.service";
  std::ofstream(unit) << absl::StrReplaceAll(
      ReadBytes(Deploy("carrel.service")),
      {{"/usr/bin/carrel", std::string(CARREL_BINARY_DIR) + "/carrel"}});
  const Ran verify = Shell("systemd-analyze verify " + unit);
  EXPECT_EQ(verify.code, 0) << verify.output;
  EXPECT_EQ(verify.output, "");
  // Exposure in tenths: at most 2.0.
  const Ran security =
      Shell("systemd-analyze security --offline=true --threshold=20 --no-pager " + unit);
  EXPECT_EQ(security.code, 0) << security.output;
  EXPECT_THAT(security.output, testing::HasSubstr("Overall exposure level"));
  std::cout << security.output.substr(security.output.find("Overall exposure level")) << std::endl;
}

TEST(DeployFilesTest, Dashboard_IsJsonWithAQueryInEveryPanel) {
  const json dashboard = json::parse(ReadBytes(Deploy("grafana/carrel.json")), nullptr, false);
  ASSERT_TRUE(dashboard.is_object());
  ASSERT_GE(dashboard["panels"].size(), 10u);
  for (const json& panel : dashboard["panels"]) {
    ASSERT_FALSE(panel["targets"].empty()) << panel["title"];
    for (const json& target : panel["targets"]) EXPECT_FALSE(NamesIn(target["expr"]).empty());
  }
}

// The documents of a YAML file of deploy/; null where python3-yaml is not installed.
json Yaml(const std::string& file) {
  if (Shell("python3 -c 'import yaml'").code != 0) return json();
  const Ran ran =
      Shell(absl::StrCat("python3 -c 'import sys, yaml, json; print(json.dumps([d for d in "
                         "yaml.safe_load_all(open(sys.argv[1]))]))' ",
                         Deploy(file)));
  EXPECT_EQ(ran.code, 0) << ran.output;
  return json::parse(ran.output, nullptr, false);
}

TEST(DeployFilesTest, Yaml_IsWellFormedAndNamesThingsThatExist) {
  const std::string image = absl::StrCat("carrel:", kVersion);
  for (const char* file :
       {"compose.yaml", "kubernetes/carrel.yaml", "kubernetes/podmonitor.yaml"}) {
    const json documents = Yaml(file);
    if (documents.is_null()) GTEST_SKIP() << "python3-yaml is not installed";
    ASSERT_TRUE(documents.is_array() && !documents.empty()) << file;
    if (std::string(file) == "compose.yaml") {
      const json& carrel = documents[0]["services"]["carrel"];
      EXPECT_EQ(carrel["read_only"], true);
      EXPECT_EQ(carrel["image"], image);
      EXPECT_EQ(documents[0]["name"], "carrel") << "its volume is carrel_store";
      EXPECT_TRUE(fs::exists(fs::path(Deploy("")) / carrel["build"]["context"].get<std::string>() /
                             carrel["build"]["dockerfile"].get<std::string>()));
      continue;
    }
    for (const json& document : documents) {
      EXPECT_TRUE(document.contains("apiVersion") && document.contains("kind") &&
                  document["metadata"].contains("name"))
          << document;
      if (document["kind"] != "StatefulSet") continue;
      const json& pod = document["spec"]["template"]["spec"];
      EXPECT_EQ(pod["securityContext"]["runAsNonRoot"], true);
      const json& container = pod["containers"][0];
      EXPECT_EQ(container["securityContext"]["readOnlyRootFilesystem"], true);
      EXPECT_EQ(container["image"], image) << "without a tag it would be pulled each time";
      std::set<std::string> volumes = {"store"};
      for (const json& volume : pod["volumes"]) volumes.insert(volume["name"]);
      for (const json& mount : container["volumeMounts"]) {
        EXPECT_TRUE(volumes.contains(mount["name"])) << mount;
      }
      for (const char* probe : {"startupProbe", "readinessProbe", "livenessProbe"}) {
        EXPECT_EQ(container[probe]["grpc"]["port"], 50051) << probe;
      }
    }
  }
}

TEST(DeployFilesTest, Kubernetes_ManifestsAreValid) {
  NEEDS("kubernetes-validate");
  const Ran ran = Shell("kubernetes-validate " + Deploy("kubernetes/carrel.yaml"));
  EXPECT_EQ(ran.code, 0) << ran.output;
}

TEST(DeployFilesTest, Containerfile_RendersChats) {
  EXPECT_THAT(ReadBytes(Deploy("Containerfile")), testing::HasSubstr("python3-jinja2"));
}

// A configuration as it is shipped, but for its places and ports, and the program started under it: what
// stands in the files' own comments takes a context in.
class ShippedTest : public DeployTest {
 protected:
  using Environment = std::vector<std::pair<std::string, std::string>>;

  std::string Here(const std::string& text) const {
    return absl::StrReplaceAll(text, {{"/var/lib/carrel/store", path("served")},
                                      {"/run/carrel/carrel.sock", SocketPath()},
                                      {"0.0.0.0:50051", "127.0.0.1:0"},
                                      {"127.0.0.1:50051", "127.0.0.1:0"},
                                      {"0.0.0.0:9464", "127.0.0.1:0"},
                                      {"127.0.0.1:9464", "127.0.0.1:0"}});
  }

  void TakesInAContext(const std::string& toml, const Environment& environment) {
    Command command;
    command.args = {"serve", "--config", WriteFile("shipped.toml", Here(toml))};
    for (const auto& [name, value] : environment) {
      command.environment.emplace_back(name, Here(value));
    }
    const auto server = Process::Start(command);
    ASSERT_TRUE(WaitUntil([&] {
      return !server->Running() || absl::StrContains(server->err(), "metrics on");
    })) << server->err();
    ASSERT_TRUE(server->Running()) << server->err();
    EXPECT_THAT(server->err(), testing::HasSubstr(" ready on unix:"));
    ASSERT_THAT(Carrel({"export", kKept, path("kept.carrel"), "--store", store_}), Succeeds());
    const std::string address = "unix:" + SocketPath();
    Command import;
    import.args = {"import", "-", "--server", address};
    import.input = ReadBytes(path("kept.carrel"));
    EXPECT_THAT(Carrel(import), Succeeds());
    EXPECT_EQ(Carrel(Ask(kKept, {"--server", address})).out, answer_);
    server->Signal(SIGTERM);
    EXPECT_EQ(server->Wait().exit_code, 0);
  }
};

TEST_F(ShippedTest, Unit_ItsConfigurationTakesInAContext) {
  TakesInAContext(ReadBytes(Deploy("carrel.toml")), {});
}

// What every pod of the namespace gets of the Services carrel and carrel-serve is no misspelt setting.
TEST_F(ShippedTest, Kubernetes_ItsConfigurationTakesInAContext) {
  const json documents = Yaml("kubernetes/carrel.yaml");
  if (documents.is_null()) GTEST_SKIP() << "python3-yaml is not installed";
  Environment of_services;
  for (const char* service : {"CARREL", "CARREL_SERVE", "CARREL_SERVE_METRICS"}) {
    const std::string name = service;
    for (const auto& [end, value] : Environment{{"_SERVICE_HOST", "10.0.0.7"},
                                                {"_SERVICE_PORT", "50051"},
                                                {"_SERVICE_PORT_GRPC", "50051"},
                                                {"_PORT", "tcp://10.0.0.7:50051"},
                                                {"_PORT_50051_TCP", "tcp://10.0.0.7:50051"},
                                                {"_PORT_50051_TCP_PROTO", "tcp"},
                                                {"_PORT_50051_TCP_PORT", "50051"},
                                                {"_PORT_50051_TCP_ADDR", "10.0.0.7"}}) {
      of_services.emplace_back(name + end, value);
    }
  }
  for (const json& document : documents) {
    if (document["kind"] != "ConfigMap") continue;
    TakesInAContext(document["data"]["carrel.toml"].get<std::string>(), of_services);
  }
}

TEST_F(ShippedTest, Compose_ItsEnvironmentTakesInAContext) {
  const json documents = Yaml("compose.yaml");
  if (documents.is_null()) GTEST_SKIP() << "python3-yaml is not installed";
  Environment environment;
  for (const auto& [name, value] : documents[0]["services"]["carrel"]["environment"].items()) {
    environment.emplace_back(name, value.get<std::string>());
  }
  TakesInAContext(ReadBytes(Deploy("carrel.toml")), environment);
}

// Whatever the program is linked to is among the packages of the image.
TEST(DeployFilesTest, Containerfile_NamesThePackageOfEveryLibrary) {
#ifdef CARREL_SANITIZED
  GTEST_SKIP() << "a sanitized program is linked to more libraries than the one that is released";
#endif
  NEEDS("dpkg");
  const std::string carrel = std::string(CARREL_BINARY_DIR) + "/carrel";
  const Ran needed = Shell("readelf -d " + carrel + " | sed -n 's/.*NEEDED.*\\[\\(.*\\)\\]/\\1/p'");
  ASSERT_EQ(needed.code, 0) << needed.output;
  const Ran linked = Shell("ldd " + carrel);
  const std::string image = ReadBytes(Deploy("Containerfile"));
  int libraries = 0;
  for (const absl::string_view library : absl::StrSplit(needed.output, '\n', absl::SkipEmpty())) {
    if (absl::StartsWith(library, "ld-linux")) continue;  // of libc6; ldd shows it in another way
    const size_t at = linked.output.find(absl::StrCat(library, " => "));
    ASSERT_NE(at, std::string::npos) << library;
    const std::string path = linked.output.substr(
        at + library.size() + 4, linked.output.find(" (", at) - at - library.size() - 4);
    const Ran owner = Shell(absl::StrCat("dpkg -S $(readlink -f ", path, ") | cut -d: -f1"));
    const std::string package(absl::StripAsciiWhitespace(owner.output));
    static const std::set<std::string> in_every_image = {"libc6", "libgcc-s1", "libstdc++6"};
    // dpkg knows some by another path (/lib and /usr/lib).
    if (in_every_image.contains(package) || absl::StrContains(package, "no path found")) continue;
    EXPECT_THAT(image, testing::HasSubstr(absl::StrCat(" ", package, " "))) << library;
    ++libraries;
  }
  EXPECT_GT(libraries, 10);
}

}  // namespace
}  // namespace carrel::cli
