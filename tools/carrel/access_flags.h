// What: the flags of a server about who may do what: keys, TLS, the audit log.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/certificate.h"
#include "kvstore/access/audit_log.h"
#include "kvstore/service/server.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct AccessFlags {
  std::string keys;
  TlsFiles tls;
  bool insecure = false;
  std::string socket_mode = "0600";  // octal
  std::string audit_log;

  void Declare(CLI::App& command);
  // Into the config; the audit log outlives the server. Null: none is wanted.
  absl::StatusOr<std::unique_ptr<kvstore::AuditLog>> Apply(kvstore::ServerConfig& config) const;
};

}  // namespace carrel::tools
