#include "kvstore/format/context_name.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace carrel::kvstore {

absl::Status ValidateContextName(absl::string_view name) {
  constexpr size_t kShown = 128;
  const auto allowed = [](char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
  };
  if (name.empty() || name.size() > 128 || name[0] == '.' || name[0] == '-' ||
      !std::all_of(name.begin(), name.end(), allowed)) {
    return absl::InvalidArgumentError(
        absl::StrCat("context name \"", absl::CHexEscape(name.substr(0, kShown)),
                     name.size() > kShown ? "..." : "",
                     "\" is not 1 to 128 of A-Z a-z 0-9 . _ - starting with a letter, digit or _"));
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
