// What:   whether a page can be written, asked at the beginning of the long job that ends with it.
// Errors: InvalidArgument no name, or that of a folder; those of writing there.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace carrel::tools {

absl::Status CheckPage(const std::string& path);

}  // namespace carrel::tools
