// What:      a whole file mapped read-only.
// Errors:    NotFound, PermissionDenied, ... naming the path; an empty file maps to an empty view.
//            Bytes that cannot be read any more are zeros (mapping_guard.h), and the file may be
//            written to by others: who uses what was read asks CheckReadable, and may compare
//            Identify with opened_as, afterwards.
// Ownership: bytes() lives as long as the MappedFile, which keeps the file open.
// Threads:   immutable, share freely.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/file_identity.h"
#include "common/mapping_guard.h"

namespace carrel {

// How a mapped file will be read; advice to the kernel, which costs speed, not bytes, if it is
// wrong.
// kSparse: a page here and there; the kernel reads no more than what is touched, where it would
//   otherwise read megabytes around each fault. What is known ahead is asked for by AskAhead.
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
  const std::string& path() const { return path_; }
  // For reads that are not to touch the mapping.
  int fd() const { return fd_; }

  // The file as it was just before it was mapped, and as it is now: the one that is mapped, whatever
  // stands at its path.
  const FileIdentity& opened_as() const { return opened_as_; }
  absl::StatusOr<FileIdentity> Identify() const { return IdentifyFile(fd_, path_); }
  // DataLoss (names the file) once a page of it could not be read.
  absl::Status CheckReadable() const;

  void Expect(FileAccess access) const;

  // Starts reading `part` of bytes() and returns; several such reads overlap. Cost: some us.
  static void AskAhead(absl::string_view part);

  // Reads all of it, in order, and maps it in large pages where the file system has them; pages
  // that were read one by one would stay small. Others may read it meanwhile. After
  // Expect(kLargePages). Ends early, with no harm, when `cancelled` is set.
  void Load(const std::atomic<bool>& cancelled) const;

  // Takes the file's pages out of this process; they come back when they are read. For keeping
  // within a memory budget: what the page cache keeps is the kernel's business.
  void ReleasePages() const;

 private:
  MappedFile(std::string path, int fd, const FileIdentity& opened_as, absl::string_view bytes);
  const std::string path_;
  const int fd_;
  const FileIdentity opened_as_;
  const absl::string_view bytes_;
  std::unique_ptr<MappingGuard> guard_;  // null if there are no bytes
};

}  // namespace carrel
