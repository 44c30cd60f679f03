// What:   documents that a service was given and has not prefilled yet, as files of their store, so that
//         they outlive the process: DIR/waiting/NAME.document (docs/formats.md). Of one that is half prefilled
//         the finished layers are prefill's own, under the same name. Of one that failed its error is left,
//         DIR/waiting/NAME.failed.
// Errors: DataLoss a file that is damaged, or named as another document (names it);
//         FailedPrecondition one of another version; ResourceExhausted, PermissionDenied the disk.
// Threads: one at a time.
// Cost:   4 bytes per token, written and synced.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"

namespace carrel::serving {

struct WaitingDocument {
  std::string name;
  std::string who;  // whose key brought it, by its name; empty: there were no keys
  std::vector<TokenId> tokens;
  std::vector<std::pair<std::string, std::string>> fingerprint;  // of the model that reads it
  int64_t created_unix_s = 0;
};

class WaitingDocuments {
 public:
  static constexpr uint32_t kFormatVersion = 2;  // 1, which does not say who, is read

  // store: its folder.
  explicit WaitingDocuments(const std::string& store) : folder_(store + "/waiting") {}

  // On disk when it returns. What was there under the name goes.
  absl::Status Put(const WaitingDocument& document) const;
  // The document goes, and its error is read from now on in its place. If that cannot be written, nothing is left.
  absl::Status PutFailure(const std::string& name, const absl::Status& error) const;
  absl::Status Remove(const std::string& name) const;  // OK if there is none

  struct Found {
    std::string name;
    absl::StatusOr<WaitingDocument> document;  // or why it failed
  };
  // All, the first that was put first.
  absl::StatusOr<std::vector<Found>> Read() const;

 private:
  std::string PathOf(const std::string& name) const;
  std::string FailurePathOf(const std::string& name) const;
  const std::string folder_;
};

}  // namespace carrel::serving
