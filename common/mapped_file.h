// What:      a whole file mapped read-only.
// Errors:    NotFound, PermissionDenied, ... naming the path; an empty file maps to an empty view.
// Ownership: bytes() lives as long as the MappedFile.     Threads: immutable, share freely.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel {

class MappedFile {
 public:
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path);
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
