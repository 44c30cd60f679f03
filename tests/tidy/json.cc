// JSON from outside has one way in (common/json.h): nlohmann's own parse, value and dump throw, or recurse as deeply as
// the text says.
#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {

Violations CheckJson(const Tree& tree) {
  static const std::regex called(
      "\\b[Jj]son::(parse|accept|sax_parse|from_[a-z]+)\\b|\\.dump\\s*\\(|[.>]value\\s*\\([^)]");
  Violations violations;
  for (const TextFile& file : tree.files) {
    const bool ours =
        file.IsSource() && file.path != "common/json.cc" &&
        !absl::StartsWith(file.path, "tests/") && !absl::StartsWith(file.path, "bench/") &&
        !absl::StrContains(file.path, "_test") && !absl::StrContains(file.path, "/test_");
    if (!ours || !absl::StrContains(file.text, "json")) continue;
    const std::string code = CodeOnly(file.text);
    size_t line = 1, begin = 0;
    while (begin <= code.size()) {
      const size_t end = std::min(code.find('\n', begin), code.size());
      std::smatch match;
      const std::string text = code.substr(begin, end - begin);
      if (std::regex_search(text, match, called)) {
        violations.push_back(
            At(file, line, absl::StrCat(match.str(), ": common/json.h does that")));
      }
      begin = end + 1;
      ++line;
    }
  }
  return violations;
}

}  // namespace carrel::tidy
