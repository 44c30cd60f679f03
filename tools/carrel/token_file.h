// What:   token ids from a file that holds a JSON array of integers.
// Errors: InvalidArgument something else (names file and index).
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"

namespace carrel::tools {

absl::StatusOr<std::vector<TokenId>> ReadTokenFile(const std::string& path);

}  // namespace carrel::tools
