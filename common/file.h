// What:   small files: read whole, write atomically.
// Errors: as ErrnoStatus, naming the path. A failed or interrupted write leaves the old file (or
// none), never a torn one.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel {

absl::StatusOr<std::string> ReadFile(const std::string& path);  // "-" is standard input

// Writes path.tmp, syncs it, renames it over path and syncs the folder.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes);

}  // namespace carrel
