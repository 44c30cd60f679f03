#include "kvstore/engine/fingerprint_check.h"

#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

// A field is a stranger's input: a message shows a bounded part of it.
std::string Shown(const std::string* value) {
  constexpr size_t kLongest = 128;
  if (value == nullptr) return "none";
  if (value->empty()) return "\"\"";
  return value->size() <= kLongest ? *value : absl::StrCat(value->substr(0, kLongest), "...");
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
  for (const auto& [name, values] : both) {
    const auto& [has, presented] = values;
    if (has != nullptr && presented != nullptr && *has == *presented) continue;
    differing.push_back(
        absl::StrCat(Shown(&name), ": context has ", Shown(has), ", model has ", Shown(presented)));
    if (differing.size() == 64) break;  // wholly different: the rest says nothing more
  }
  if (differing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("fingerprint mismatch: ", absl::StrJoin(differing, "; ")));
}

}  // namespace carrel::kvstore
