#include "decoder/select/selector_config.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "decoder/select/method_type.h"

namespace carrel::decoder {

absl::string_view SelectorKindName(SelectorKind kind) { return MethodOf(kind).name(); }

SelectorConfig WithOversample(SelectorConfig config, int64_t automatic) {
  if (config.oversample == kAutoOversample &&
      (config.kind != SelectorKind::kHash || automatic == 1)) {
    config.oversample = automatic;
  }
  return config;
}

std::string DescribeSelector(const SelectorConfig& config) {
  const MethodType& method = MethodOf(config.kind);
  return absl::StrCat(method.name(), method.Describe(config));
}

SelectorConfig UsualSelector(bool keys_cross_bus) {
  SelectorConfig config;
  config.kind = keys_cross_bus ? SelectorKind::kHash : SelectorKind::kExact;
  return config;
}

absl::StatusOr<SelectorConfig> ParseSelector(absl::string_view text) {
  const MethodSettings settings(text);
  std::vector<absl::string_view> known;
  for (size_t kind = 0; kind < AllMethods().size(); ++kind) {
    const MethodType& method = *AllMethods()[kind];
    known.push_back(method.name());
    if (method.name() != settings.name()) continue;
    SelectorConfig config;
    config.kind = static_cast<SelectorKind>(kind);
    RETURN_IF_ERROR(method.Parse(settings, config));
    return config;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "method=", text, " is none of ", absl::StrJoin(known, ", "), " (NAME:key=value,..)"));
}

}  // namespace carrel::decoder
