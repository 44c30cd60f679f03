#include "kvstore/access/audit_log.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "common/json.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace carrel::kvstore {
namespace {

absl::StatusOr<int> OpenToAppend(const std::string& path) {
  const int fd =
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("audit log ", path));
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat("audit log ", path, ": is no regular file"));
  }
  return fd;
}

}  // namespace

std::string AuditLine(const AuditEvent& event, absl::Time now) {
  nlohmann::ordered_json line;
  line["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", now, absl::UTCTimeZone());
  line["event"] = event.event;
  line["key"] = event.key;
  line["tenant"] = event.tenant;
  line["peer"] = event.peer;
  line["rpc"] = event.rpc;
  line["context"] = event.context;
  line["content_id"] = event.content_id;
  line["tokens"] = event.tokens;
  line["bytes"] = event.bytes;
  line["result"] = absl::StatusCodeToString(event.result.code());
  if (!event.result.ok()) line["reason"] = std::string(event.result.message());
  // Names come from strangers: what is no UTF-8 is replaced, what ends a line is escaped.
  return DumpJson(line);
}

absl::StatusOr<std::unique_ptr<AuditLog>> AuditLog::Open(const std::string& path) {
  ASSIGN_OR_RETURN(const int fd, OpenToAppend(path));
  return std::unique_ptr<AuditLog>(new AuditLog(path, fd));
}

AuditLog::~AuditLog() { close(fd_); }

void AuditLog::Write(const AuditEvent& event) {
  const std::string line = AuditLine(event, absl::Now()) + "\n";
  absl::MutexLock lock(&mu_);
  ssize_t written;
  do {
    written = write(fd_, line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(line.size())) return;
  const int error = written < 0 ? errno : ENOSPC;
  // A torn line would spoil the next one, too.
  if (written > 0) {
    const off_t end = lseek(fd_, 0, SEEK_END);
    if (end < written || ftruncate(fd_, end - written) != 0) {
      spdlog::error("audit log {}: a torn line stays in it", path_);
    }
  }
  ++unwritten_;
  spdlog::error("audit log {}: {}, {} lines are missing: {}", path_,
                std::string(ErrnoStatus(error, "write").message()), unwritten_,
                line.substr(0, line.size() - 1));
}

absl::Status AuditLog::Reopen() {
  ASSIGN_OR_RETURN(const int fd, OpenToAppend(path_));
  absl::MutexLock lock(&mu_);
  close(fd_);
  fd_ = fd;
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
