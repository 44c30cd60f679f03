// What: text of somebody else's as a message shows it: at most `most` bytes of it, cut where a character
//       ends, with control characters escaped, so that a message stays one line of bounded length.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace carrel {

inline std::string Shown(absl::string_view text, size_t most = 128) {
  const size_t all = text.size();
  if (all > most) {
    while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
    text = text.substr(0, most);
  }
  std::string shown;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppend(&shown, "\\x", absl::Hex(byte, absl::kZeroPad2));
    } else {
      shown.push_back(c);
    }
  }
  if (all > text.size()) absl::StrAppend(&shown, "... (", all, " bytes)");
  return shown;
}

}  // namespace carrel
