// What: text of somebody else's as a message shows it: at most `most` bytes of it, cut where a character
//       ends, with what steers a terminal escaped, so that a message stays one line of bounded length.
#pragma once

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace carrel {

// Bytes of the character that a text (not empty) begins with, if a terminal obeys it instead of showing it: a
// control of ASCII or of U+0080 .. U+009F, an end of a line or paragraph (U+2028, U+2029), one that turns the
// direction of what follows (U+202A .. U+202E, U+2066 .. U+2069). 0: it is shown.
inline size_t SteeringBytes(absl::string_view text) {
  const auto at = [&](size_t i) -> int {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : -1;
  };
  if (at(0) < 0x20 || at(0) == 0x7f) return 1;
  if (at(0) == 0xc2 && at(1) >= 0x80 && at(1) < 0xa0) return 2;
  const bool turns = (at(1) == 0x80 && at(2) >= 0xa8 && at(2) <= 0xae) ||
                     (at(1) == 0x81 && at(2) >= 0xa6 && at(2) <= 0xa9);
  return at(0) == 0xe2 && turns ? 3 : 0;
}

inline std::string Shown(absl::string_view text, size_t most = 128) {
  const size_t all = text.size();
  if (all > most) {
    while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
    text = text.substr(0, most);
  }
  std::string shown;
  const size_t left = text.size();
  while (!text.empty()) {
    size_t steering = SteeringBytes(text);
    if (steering == 0) shown.push_back(text.front());
    for (size_t i = 0; i < steering; ++i) {
      absl::StrAppend(&shown, "\\x",
                      absl::Hex(static_cast<unsigned char>(text[i]), absl::kZeroPad2));
    }
    text.remove_prefix(std::max<size_t>(1, steering));
  }
  if (all > left) absl::StrAppend(&shown, "... (", all, " bytes)");
  return shown;
}

}  // namespace carrel
