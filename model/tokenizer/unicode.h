// What:   the few facts of the Unicode character database that tokenizers need.
// Source: libutf8proc (Unicode 14); White_Space from PropList.txt; word characters as UTS #18,
//         annex C, defines \w.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::model {

bool IsWhiteSpace(uint32_t code_point);
bool IsWordCharacter(uint32_t code_point);

// Normalization form C. The text must be valid UTF-8. Cost: ASCII text is only copied.
absl::StatusOr<std::string> NormalizeNfc(absl::string_view text);

}  // namespace carrel::model
