// What:   UTF-8 as the Unicode standard defines it (table 3-7): no overlong forms, no surrogates,
//         nothing above U+10FFFF.
// Errors: InvalidArgument naming the offset and value of the first byte of the first bad sequence.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carrel::model {

struct Utf8Char {
  uint32_t code_point = 0;
  size_t size = 0;  // bytes; 0: what stands there is not a character, or not yet a whole one
};

// The character that `bytes` begins with.
Utf8Char DecodeUtf8(absl::string_view bytes);

// The character that ends where `bytes` ends.
Utf8Char DecodeLastUtf8(absl::string_view bytes);

absl::Status ValidateUtf8(absl::string_view bytes);

// The size of `bytes` without the beginning of a character at its end that further bytes could
// still complete. Bytes that no continuation can make valid count as complete.
size_t CompleteUtf8Size(absl::string_view bytes);

}  // namespace carrel::model
