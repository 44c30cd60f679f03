#include "tools/carrel/known_names.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "carrel/v1/context.pb.h"
#include "kvstore/service/context_client.h"

namespace carrel::tools {
namespace {

constexpr size_t kShown = 8;

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

absl::Status WithNames(const absl::Status& status, const library::StoreAddress& store,
                       const std::string& wanted) {
  if (!absl::IsNotFound(status) || (!absl::StrContains(status.message(), "is not in the store") &&
                                    !absl::StrContains(status.message(), "is not in store"))) {
    return status;
  }
  const auto access = library::StoreAccess::Open(store, kvstore::StoreMode::kReadOnly);
  if (!access.ok()) return status;
  const auto client = (*access)->NewContextClient();
  if (!client.ok()) return status;
  const auto listed = (*client)->List();
  if (!listed.ok()) return status;
  std::vector<std::string> names;
  for (const auto& summary : listed->contexts()) names.push_back(summary.name());
  if (names.empty()) {
    return absl::Status(status.code(), absl::StrCat(status.message(), "; there is none"));
  }
  const std::string near = DidYouMean(wanted, names);
  const size_t more = names.size() > kShown ? names.size() - kShown : 0;
  names.resize(names.size() - more);
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), near,
                   near.empty() ? "; there are: " : " There are: ", absl::StrJoin(names, ", "),
                   more > 0 ? absl::StrCat(" and ", more, " more") : ""));
}

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
