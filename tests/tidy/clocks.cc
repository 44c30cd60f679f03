// How long something takes or is waited for is counted by a clock that nobody sets (common/steady_time.h): where an
// administrator or NTP sets the time back by an hour, a wait of two seconds by the other one is an hour and two seconds.
#include <algorithm>
#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {

Violations CheckClocks(const Tree& tree) {
  static const std::regex set("(ToUnixSeconds\\()?(absl::Now\\(\\)|\\bsystem_clock\\b)");
  Violations violations;
  for (const TextFile& file : tree.files) {
    const bool serves =
        absl::StartsWith(file.path, "http_api/") || absl::StartsWith(file.path, "serving/");
    if (!file.IsSource() || !serves || absl::StrContains(file.path, "_test")) {
      continue;
    }
    const std::string code = CodeOnly(file.text);
    for (std::sregex_iterator it(code.begin(), code.end(), set), end; it != end; ++it) {
      if ((*it)[1].matched) continue;  // a date
      const auto at = code.begin() + it->position();
      violations.push_back(
          At(file, 1 + static_cast<size_t>(std::count(code.begin(), at, '\n')),
             absl::StrCat(it->str(), ": SteadyNow(), unless a date is shown or stored")));
    }
  }
  return violations;
}

}  // namespace carrel::tidy
