#include "tools/carrel/access_flags.h"

#include <CLI/CLI.hpp>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/access/access.h"

namespace carrel::tools {
namespace {

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

}  // namespace

void AccessFlags::Declare(CLI::App& command) {
  command.add_option(
      "--keys", keys,
      "file that says who may do what (docs/trust.md); read again when it changes; see "
      "carrel keys. Without: a Unix socket's callers may do all, others list and open");
  command.add_option("--tls-cert", tls.certificate,
                     "TLS on TCP addresses: certificate chain; read again when it changes");
  command.add_option("--tls-key", tls.key, "key of --tls-cert");
  command.add_option("--tls-client-ca", tls.ca,
                     "clients must have a certificate of one of these authorities");
  command.add_flag(
      "--insecure", insecure,
      "listen where others than this machine can reach it, although TLS or credentials "
      "(--keys or --tls-client-ca) are missing");
  command.add_option("--socket-mode", socket_mode, "mode of Unix sockets' files, octal");
  command.add_option("--audit-log", audit_log,
                     "file to which one JSON line is appended per session, deletion and denial; "
                     "opened again on SIGHUP");
}

absl::StatusOr<std::unique_ptr<kvstore::AuditLog>> AccessFlags::Apply(
    kvstore::ServerConfig& config) const {
  ASSIGN_OR_RETURN(config.socket_mode, ParseMode(socket_mode));
  config.tls = tls;
  config.insecure = insecure;
  if (!keys.empty()) {
    ASSIGN_OR_RETURN(config.access, kvstore::Access::Create(keys));
  }
  std::unique_ptr<kvstore::AuditLog> log;
  if (!audit_log.empty()) {
    ASSIGN_OR_RETURN(log, kvstore::AuditLog::Open(audit_log));
  }
  config.audit = log.get();
  return log;
}

}  // namespace carrel::tools
