// What:   whether a regular expression matches all of a text, as Python's re.fullmatch has it.
// Source: PCRE2, which reads alike what names of modules are matched with.
// Errors: InvalidArgument a pattern that is none, or longer than kMaxPatternBytes; a match that takes too
//         many steps.
// Threads: immutable, reentrant.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::model {

class FullMatch {
 public:
  static constexpr size_t kMaxPatternBytes = 16384;

  static absl::StatusOr<FullMatch> Compile(absl::string_view pattern);
  absl::StatusOr<bool> Matches(absl::string_view text) const;

 private:
  struct Code;
  explicit FullMatch(std::shared_ptr<const Code> code) : code_(std::move(code)) {}
  std::shared_ptr<const Code> code_;
};

}  // namespace carrel::model
