// What:   what a context may be called: 1 to 128 of A-Z a-z 0-9 . _ - and not starting with '.' or
//         '-'. It is a path part and a command-line word.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carrel::kvstore {

absl::Status ValidateContextName(absl::string_view name);  // InvalidArgument names it

}  // namespace carrel::kvstore
