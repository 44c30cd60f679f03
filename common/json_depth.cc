#include "common/json_depth.h"

#include "absl/strings/str_cat.h"

namespace carrel {

absl::Status CheckJsonDepth(absl::string_view text, absl::string_view where) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;  // whatever is escaped does not end the string
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxJsonDepth) {
        return absl::InvalidArgumentError(
            absl::StrCat(where, ": JSON nests deeper than ", kMaxJsonDepth, " levels at byte ", i));
      }
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return absl::OkStatus();
}

}  // namespace carrel
