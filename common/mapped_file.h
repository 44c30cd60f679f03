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

// How a mapped file will be read; advice to the kernel, which costs speed, not bytes, if it is wrong.
// kSparse: a page here and there; the kernel reads no more than what is touched, where it would
//   otherwise read megabytes around each fault.
// kLargePages: soon all of it, in any order; files are read and mapped in pages of 2 MiB where the
//   file system has them (ext4 from Linux 6.16), so that a random row costs no walk of page tables.
enum class FileAccess : uint8_t { kSparse = 0, kLargePages = 1 };

class MappedFile {
 public:
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  absl::string_view bytes() const { return bytes_; }

  void Expect(FileAccess access) const;

  // Takes the file's pages out of this process; they come back when they are read. For keeping
  // within a memory budget: what the page cache keeps is the kernel's business.
  void ReleasePages() const;

 private:
  explicit MappedFile(absl::string_view bytes) : bytes_(bytes) {}
  absl::string_view bytes_;
};

}  // namespace carrel
