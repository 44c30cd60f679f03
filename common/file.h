// What:   small files: read whole, write atomically.
// Errors: as ErrnoStatus, naming the path; InvalidArgument no regular file (a folder, FIFO, device). A failed or interrupted write leaves the old file (or
//         none), never a torn one.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carrel {

// More than most_bytes: InvalidArgument. What is read whole is a document, a question, a tokenizer.
inline constexpr int64_t kMostFileBytes = int64_t{1} << 30;

// "-" is standard input.
absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t most_bytes = kMostFileBytes);

// Writes path.tmp (the pieces one after the other), syncs it, renames it over path and syncs the folder.
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::Span<const absl::string_view> pieces);
// A secret: mode 0600 from the first byte, whatever the umask; what was there is replaced.
absl::Status WritePrivateFile(const std::string& path, absl::string_view bytes);
inline absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes) {
  return WriteFileAtomically(path, absl::MakeConstSpan(&bytes, 1));
}

// Writes all of it behind what the open file has. what: of errors.
absl::Status WriteAll(int fd, absl::string_view bytes, const std::string& what);

// A folder that its owner alone may enter, and what leads to it; one that is there keeps its mode.
absl::Status MakePrivateFolder(const std::string& path);

// Whether bytes [offset, offset + bytes) of a file at path could be written now. The file system is asked for the room; of the bytes the last ones, kProbedBytes
// at most, are allocated in path.room and given back, so that a quota and a limit on file size show, and a size that somebody only declares costs nothing.
// ResourceExhausted if not. For writers that cannot take a failed write well: Debian's RocksDB aborts on it.
inline constexpr int64_t kProbedBytes = int64_t{16} << 20;
absl::Status ProbeRoom(const std::string& path, int64_t offset, int64_t bytes);

}  // namespace carrel
