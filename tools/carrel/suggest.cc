#include "tools/carrel/suggest.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/str_cat.h"

namespace carrel::tools {
namespace {

constexpr size_t kLongest = 64;

// Letters added, left out, changed, or two neighbours swapped.
int64_t Distance(absl::string_view a, absl::string_view b) {
  std::vector<std::vector<int64_t>> d(a.size() + 1, std::vector<int64_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = static_cast<int64_t>(i);
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = static_cast<int64_t>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min(
          {d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string DidYouMean(absl::string_view given, const std::vector<std::string>& names,
                       absl::string_view before) {
  if (given.empty() || given.size() > kLongest) return "";
  const std::string* best = nullptr;
  int64_t nearest = std::max<int64_t>(1, static_cast<int64_t>(given.size()) / 3) + 1;
  for (const std::string& name : names) {
    const int64_t distance = Distance(given, name);
    if (distance >= nearest) continue;
    nearest = distance;
    best = &name;
  }
  return best == nullptr ? "" : absl::StrCat("; did you mean ", before, *best, "?");
}

}  // namespace carrel::tools
