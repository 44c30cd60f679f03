// What:   a bound on how deeply JSON text nests, checked before it is parsed: what walks a document
//         (printing, copying) recurses, and a file may nest deeper than the stack.
// Errors: InvalidArgument beyond kMaxJsonDepth, naming `where` and the byte.
// Edge:   malformed text passes, or fails with this error: the parser has the word on it.
// Cost:   one pass over the bytes.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carrel {

inline constexpr int kMaxJsonDepth = 64;  // arrays and objects within each other

absl::Status CheckJsonDepth(absl::string_view text, absl::string_view where);

}  // namespace carrel
