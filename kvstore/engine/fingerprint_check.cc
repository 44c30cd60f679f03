#include "kvstore/engine/fingerprint_check.h"

#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

// Of all that differs, so that a message fits into what gRPC sends as a status (8 KiB).
constexpr size_t kMostListedBytes = 4096;

std::string Shown(const std::string* value) {
  if (value == nullptr) return "none";
  return value->empty() ? "\"\"" : carrel::Shown(*value);
}

}  // namespace

absl::Status CheckFingerprint(const FingerprintFields& context, const FingerprintFields& model) {
  if (model.empty()) {
    return absl::InvalidArgumentError("fingerprint is empty: the model must say what it is");
  }
  std::map<std::string, std::pair<const std::string*, const std::string*>> both;
  for (const auto& [name, value] : context) both[name].first = &value;
  for (const auto& [name, value] : model) {
    auto& slot = both[name].second;
    if (slot != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("fingerprint has the field ", Shown(&name), " twice"));
    }
    slot = &value;
  }
  std::vector<std::string> differing;
  size_t listed_bytes = 0;
  for (const auto& [name, values] : both) {
    const auto& [has, presented] = values;
    if (has != nullptr && presented != nullptr && *has == *presented) continue;
    differing.push_back(
        absl::StrCat(Shown(&name), ": context has ", Shown(has), ", model has ", Shown(presented)));
    listed_bytes += differing.back().size();
    if (listed_bytes > kMostListedBytes) {  // wholly different: the rest says nothing more
      differing.push_back("...");
      break;
    }
  }
  if (differing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("fingerprint mismatch: ", absl::StrJoin(differing, "; ")));
}

}  // namespace carrel::kvstore
