// What:   a failed allocation as the status of what was tried, or, where nothing catches it, as a message.
// Errors: ResourceExhausted "what: out of memory".
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carrel {

absl::Status NoMemoryStatus(absl::string_view what);

// An allocation that fails where nothing catches it ends the process with exit code 1 and a message
// on standard error, instead of an abort. For main.
void ExitWhenMemoryEnds();

}  // namespace carrel
