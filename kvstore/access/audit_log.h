// What:   one JSON line per Open, Close, Import, Delete and denial, in a file that is only appended
//         to (docs/formats.md). Written before the caller has his answer.
// Errors: of Open and Reopen: those of the file. A line that cannot be written is counted, and goes
//         to the program's log as an error instead: none is lost without a word.
// Threads: any. Cost: one write(2).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

struct AuditEvent {
  std::string event;  // "open", "close", "import", "delete", "denied"
  std::string key, tenant, peer;
  std::string rpc;
  std::string context, content_id;
  int64_t tokens = 0;  // of the context
  int64_t bytes = 0;   // open, import: stored ones of the context; close: requests and replies
  absl::Status result;
};

// Without the line's end.
std::string AuditLine(const AuditEvent& event, absl::Time now);

class AuditLog {
 public:
  // Made with mode 0600 if it is not there.
  static absl::StatusOr<std::unique_ptr<AuditLog>> Open(const std::string& path);
  ~AuditLog();

  void Write(const AuditEvent& event);
  // The file of that name from now on: after it was renamed.
  absl::Status Reopen();

 private:
  AuditLog(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  const std::string path_;
  absl::Mutex mu_;
  int fd_ ABSL_GUARDED_BY(mu_);
  int64_t unwritten_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace carrel::kvstore
