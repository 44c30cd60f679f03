#include "tools/carrel/known_names.h"

#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "carrel/v1/context.pb.h"
#include "kvstore/service/context_client.h"
#include "tools/carrel/suggest.h"

namespace carrel::tools {
namespace {

constexpr size_t kShown = 8;

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

}  // namespace carrel::tools
