#include "model/tokenizer/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "absl/strings/str_cat.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {
namespace {

std::string Pcre2Message(int error) {
  PCRE2_UCHAR buffer[256];
  if (pcre2_get_error_message(error, buffer, sizeof(buffer)) < 0) return "unknown error";
  return reinterpret_cast<const char*>(buffer);
}

template <auto Free>
struct Freer {
  template <typename T>
  void operator()(T* pointer) const {
    Free(pointer);
  }
};
using MatchData = std::unique_ptr<pcre2_match_data, Freer<pcre2_match_data_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Freer<pcre2_compile_context_free>>;

}  // namespace

struct SplitPattern::Code {
  std::string pattern;  // as PCRE2 reads it
  std::unique_ptr<pcre2_code, Freer<pcre2_code_free>> code;
};

SplitPattern::SplitPattern(std::unique_ptr<Code> code) : code_(std::move(code)) {}
SplitPattern::~SplitPattern() = default;
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;

absl::StatusOr<SplitPattern> SplitPattern::CompileRegex(absl::string_view oniguruma) {
  ASSIGN_OR_RETURN(const std::string pattern, TranslateOniguruma(oniguruma));
  return Compile(pattern, /*literal=*/false);
}

absl::StatusOr<SplitPattern> SplitPattern::CompileLiteral(absl::string_view text) {
  return Compile(text, /*literal=*/true);
}

absl::StatusOr<SplitPattern> SplitPattern::Compile(absl::string_view pattern, bool literal) {
  auto compiled = std::make_unique<Code>();
  compiled->pattern = std::string(pattern);
  // "." excludes only the line feed in Oniguruma; PCRE2's newline is a build option.
  const CompileContext context(pcre2_compile_context_create(nullptr));
  if (context == nullptr) return absl::ResourceExhaustedError("pattern: out of memory");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  const uint32_t options =
      PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C);
  int error = 0;
  PCRE2_SIZE offset = 0;
  compiled->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                     options, &error, &offset, context.get()));
  if (compiled->code == nullptr) {
    return absl::UnimplementedError(absl::StrCat(
        "pattern \"", Shown(pattern), "\": PCRE2 at offset ", offset, ": ", Pcre2Message(error)));
  }
  // Only speed depends on it: where there is no JIT, pcre2_match interprets.
  (void)pcre2_jit_compile(compiled->code.get(), PCRE2_JIT_COMPLETE);
  return SplitPattern(std::move(compiled));
}

absl::Status SplitPattern::FindMatches(absl::string_view text, std::vector<Match>* matches) const {
  matches->clear();
  if (text.empty()) return absl::OkStatus();
  const MatchData data(pcre2_match_data_create(1, nullptr));
  if (data == nullptr) return absl::ResourceExhaustedError("pattern: out of memory");
  const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
  size_t at = 0;
  // An empty match directly behind the previous one is not a match: look further on.
  size_t previous_end = text.size() + 1;
  while (at <= text.size()) {
    const auto match = [&](uint32_t extra) {
      return pcre2_match(code_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                         at, PCRE2_NO_UTF_CHECK | extra, data.get(), nullptr);
    };
    int found = match(0);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = match(PCRE2_NO_JIT);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      return absl::ResourceExhaustedError(absl::StrCat("pattern \"", Shown(code_->pattern),
                                                       "\" at byte offset ", at, " of ",
                                                       text.size(), ": ", Pcre2Message(found)));
    }
    const Match one{range[0], range[1]};
    if (one.end > one.begin) {
      matches->push_back(one);
      at = previous_end = one.end;
      continue;
    }
    if (one.begin != previous_end) matches->push_back(one);
    if (one.begin == text.size()) break;
    at = one.begin + DecodeUtf8(text.substr(one.begin)).size;
  }
  return absl::OkStatus();
}

}  // namespace carrel::model
