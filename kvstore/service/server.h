// What:   the gRPC server of a kvstore: RetrievalService, ContextService, health checking and, if
//         wanted, reflection, on Unix sockets and TCP, or inside this process only.
// Errors: of Start: InvalidArgument an address, a limit or a certificate; FailedPrecondition an address
//         that is in use, or that strangers reach without TLS and credentials.
// Threads: any; Drain once.   Ownership: the engine outlives the server.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/certificate.h"
#include "kvstore/access/principal.h"
#include "kvstore/service/service_limits.h"

namespace grpc {
class Channel;
}

namespace carrel::kvstore {

class Access;
class AuditLog;
class ContextSource;
class Engine;

struct ServerConfig {
  // "unix:PATH" or "HOST:PORT" each; none: in-process only. Default: loopback, as rows of a
  // document are its owner's secret.
  std::vector<std::string> listen = {"127.0.0.1:50051"};
  // Of the files of Unix sockets, less the umask: who may connect.
  uint32_t socket_mode = 0600;
  // Of TCP addresses; without a certificate: no TLS. With a CA, clients need a certificate of it.
  TlsFiles tls;
  // An address that is neither loopback nor a Unix socket needs TLS, and keys or client
  // certificates. True: not so, and a warning.
  bool insecure = false;
  // Who may do what; null: the rules of Access without a keys file, and in-process everything.
  std::shared_ptr<Access> access;
  // Null, or outlives the server.
  AuditLog* audit = nullptr;
  // Where contexts come from that the store lacks; null, or outlives the server.
  ContextSource* source = nullptr;
  // unix:PATH or HOST:PORT by which decoders reach this very server, for those that came through one that chooses
  // among several (ContextService.Locate); empty: they stay where they came.
  std::string advertise;
  // Health says NOT_SERVING until SetReady; requests are answered all the same.
  bool ready_later = false;
  ServiceLimits limits;
  // Tells anyone which services and messages there are. Each such call takes a thread: four at most.
  bool reflection = false;
};

class Server {
 public:
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerConfig& config, Engine* engine);
  virtual ~Server() = default;  // cuts what is still running

  // In the order of ServerConfig.listen, with the ports that were bound.
  virtual const std::vector<std::string>& addresses() const = 0;

  // For a client in this process; it must not outlive the server.
  virtual std::shared_ptr<grpc::Channel> InProcessChannel() = 0;

  // Health says NOT_SERVING and new sessions are refused (Unavailable) from now on; returns when
  // the running ones have ended, or after `wait` has cut them (Unavailable). Then the server is
  // shut down. The clock may be set meanwhile.
  virtual void Drain(absl::Duration wait) = 0;

  virtual void HurryUp() = 0;   // Drain waits no longer; any thread
  virtual void SetReady() = 0;  // of ready_later; nothing once Drain has begun. Any thread

  // Whether a client would be answered: connections are accepted at every address, and a health check
  // inside this process has an answer. Errors say what is not. Any thread; not once Drain has begun.
  virtual absl::Status Probe(absl::Duration limit) = 0;

  virtual ServiceStatistics statistics() const = 0;
  // What each tenant of the keys file has and did. May read the disk: what is stored is looked at once
  // a minute.
  virtual std::vector<TenantUse> tenants() = 0;
};

}  // namespace carrel::kvstore
