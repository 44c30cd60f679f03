// What:   small files: read whole, write atomically.
// Errors: as ErrnoStatus, naming the path. A failed or interrupted write leaves the old file (or
// none), never a torn one.
#pragma once

#include <initializer_list>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel {

absl::StatusOr<std::string> ReadFile(const std::string& path);  // "-" is standard input

// Writes path.tmp (the pieces one after the other), syncs it, renames it over path and syncs the folder.
absl::Status WriteFileAtomically(const std::string& path, std::initializer_list<absl::string_view> pieces);
inline absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes) {
  return WriteFileAtomically(path, {bytes});
}

}  // namespace carrel
