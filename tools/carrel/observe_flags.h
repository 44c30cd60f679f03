// What:  what `serve` tells operators: the port that Prometheus scrapes, and how log lines look.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tools/carrel/log_format.h"

namespace CLI {
class App;
}
namespace carrel::kvstore {
class Engine;
class MetricsListener;
class Residence;
class Server;
}  // namespace carrel::kvstore

namespace carrel::tools {

struct ObserveFlags {
  std::string metrics;  // "HOST:PORT" or "PORT"; empty: no port
  LogFlags log;

  void Declare(CLI::App& command);
  // Null if no port is wanted. Engine, server and residence (may be null) outlive what it returns.
  absl::StatusOr<std::unique_ptr<kvstore::MetricsListener>> Listen(
      kvstore::Engine* engine, kvstore::Server* server,
      const kvstore::Residence* residence = nullptr) const;
};

}  // namespace carrel::tools
