// What:   the regular expression by which a tokenizer.json splits text, run by PCRE2 (UTF, UCP,
//         JIT).
// Source: the patterns are written for Oniguruma with Ruby syntax. Where PCRE2 means the same they
//         pass through; \s, \S, \uHHHH and \v are rewritten to what Oniguruma means by them.
// Errors: Unimplemented, naming the construct, for what the two read differently (anchors, \w, \h,
//         nested character classes, inline options that are not groups, ...) or PCRE2 does not
//         know; ResourceExhausted a match that exceeds PCRE2's limits.
// Threads: immutable, reentrant.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::model {

// The Oniguruma pattern as PCRE2 must read it.
absl::StatusOr<std::string> TranslateOniguruma(absl::string_view pattern);

class SplitPattern {
 public:
  struct Match {
    size_t begin = 0;
    size_t end = 0;  // >= begin; an empty match splits at begin
  };

  static absl::StatusOr<SplitPattern> CompileRegex(absl::string_view oniguruma);
  static absl::StatusOr<SplitPattern> CompileLiteral(absl::string_view text);
  ~SplitPattern();
  SplitPattern(SplitPattern&&) noexcept;
  SplitPattern& operator=(SplitPattern&&) noexcept;

  // Every match from left to right, none overlapping. The text must be valid UTF-8.
  absl::Status FindMatches(absl::string_view text, std::vector<Match>* matches) const;

 private:
  struct Code;
  explicit SplitPattern(std::unique_ptr<Code> code);
  static absl::StatusOr<SplitPattern> Compile(absl::string_view pattern, bool literal);
  std::unique_ptr<Code> code_;
};

}  // namespace carrel::model
