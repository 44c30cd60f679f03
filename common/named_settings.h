// What:   the words of a choice with parameters, "NAME:key=value,key=value", as flags write it.
// Errors: InvalidArgument naming the flag, what was given, and what there is.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace carrel {

struct NamedSettings {
  absl::string_view name;
  std::vector<std::pair<absl::string_view, absl::string_view>> settings;  // in their order
};

inline NamedSettings SplitNamedSettings(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  NamedSettings split{parts.first, {}};
  for (absl::string_view setting : absl::StrSplit(parts.second, ',', absl::SkipEmpty())) {
    split.settings.emplace_back(absl::StrSplit(setting, absl::MaxSplits('=', 1)));
  }
  return split;
}

// names: pairs of a name and its value.
template <typename Value, size_t kCount>
absl::StatusOr<Value> ValueNamed(absl::string_view flag, absl::string_view text,
                                 absl::string_view name,
                                 const std::pair<absl::string_view, Value> (&names)[kCount]) {
  std::vector<absl::string_view> known;
  for (const auto& [one, value] : names) {
    if (one == name) return value;
    known.push_back(one);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      flag, "=", text, " is none of ", absl::StrJoin(known, ", "), " (NAME:key=value,..)"));
}

// parameters: a map by the names that there are.
template <typename Map>
absl::Status NoSuchParameter(absl::string_view flag, absl::string_view text, absl::string_view name,
                             absl::string_view key, const Map& parameters) {
  std::vector<absl::string_view> known;
  for (const auto& parameter : parameters) known.push_back(parameter.first);
  return absl::InvalidArgumentError(
      absl::StrCat(flag, "=", text, ": ", name, " has no parameter \"", key, "\", it has ",
                   known.empty() ? "none" : absl::StrJoin(known, ", ")));
}

}  // namespace carrel
