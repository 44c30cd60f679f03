// What:      a whole file mapped read-only.
// Errors:    NotFound, PermissionDenied, ... naming the path; an empty file maps to an empty view.
// Ownership: bytes() lives as long as the MappedFile.     Threads: immutable, share freely.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel {

// kRandom: the kernel reads no more than what is touched or asked for with AdviseWillNeed. Around
// each fault it would otherwise read megabytes.
enum class FileAccess : uint8_t { kSequential = 0, kRandom = 1 };

// Mapped bytes that are read soon: from a disk they come side by side, before they are waited for.
// Advice only: a failure costs speed, not bytes.
void AdviseWillNeed(const void* address, int64_t bytes);

class MappedFile {
 public:
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(
      const std::string& path, FileAccess access = FileAccess::kSequential);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  absl::string_view bytes() const { return bytes_; }

  // Takes the file's pages out of this process; they come back when they are read. For keeping
  // within a memory budget: what the page cache keeps is the kernel's business.
  void ReleasePages() const;

 private:
  explicit MappedFile(absl::string_view bytes) : bytes_(bytes) {}
  absl::string_view bytes_;
};

}  // namespace carrel
