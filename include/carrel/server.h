// What:      serves a store's contexts to decoders over gRPC, as `carrel serve` does.
// Errors:    InvalidArgument an address or option; FailedPrecondition the folder is locked, the
//            address taken, or open to strangers without TLS and credentials.
// Ownership: destroying it cuts what still runs; Stop lets it finish.
// Threads:   any.
// Example:   const auto server = carrel::Server::Start("out/store", {.listen = {"127.0.0.1:50051"}});
//            // examples/03_serve.cc
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "carrel/export.h"
#include "carrel/status.h"

namespace carrel {
inline namespace api {

struct ServerOptions {
  // "unix:PATH" or "HOST:PORT" each (port 0: any free one).
  std::vector<std::string> listen = {"127.0.0.1:50051"};
  bool read_only = false;    // take no lock and write nothing
  int search_threads = 0;    // 0: one per core
  int64_t memory_bytes = 0;  // that it may hold of the store; 0: half of what there is
  std::string keys;          // file that says who may do what; empty: docs/trust.md
  std::string tls_cert, tls_key, tls_client_ca;  // PEM files, read again when they change
  bool insecure = false;  // listen to strangers without TLS and credentials all the same
};

class CARREL_API Server {
 public:
  static Result<std::unique_ptr<Server>> Start(const std::string& folder,
                                               const ServerOptions& options = {});
  virtual ~Server() = default;

  // As in `listen`, with the ports that were bound.
  virtual const std::vector<std::string>& addresses() const = 0;
  // New sessions are refused; returns when the running ones have ended, or were cut after `wait_s`.
  virtual void Stop(double wait_s) = 0;
};

}  // namespace api
}  // namespace carrel
