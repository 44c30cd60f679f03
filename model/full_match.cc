#include "model/full_match.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "common/status.h"

namespace carrel::model {
namespace {

constexpr uint32_t kMaxSteps = 1'000'000, kMaxHeapKib = 16384;

std::string Message(int error) {
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

}  // namespace

struct FullMatch::Code {
  std::unique_ptr<pcre2_code, Freer<pcre2_code_free>> code;
  std::unique_ptr<pcre2_match_context, Freer<pcre2_match_context_free>> bounds;
};

absl::StatusOr<FullMatch> FullMatch::Compile(absl::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a pattern of ", pattern.size(), " bytes, more than ", kMaxPatternBytes));
  }
  auto compiled = std::make_shared<Code>();
  int error = 0;
  PCRE2_SIZE offset = 0;
  const uint32_t options =
      PCRE2_ANCHORED | PCRE2_ENDANCHORED | PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C;
  compiled->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                     options, &error, &offset, nullptr));
  if (compiled->code == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("no regular expression: at offset ", offset, ": ", Message(error)));
  }
  compiled->bounds.reset(pcre2_match_context_create(nullptr));
  if (compiled->bounds == nullptr) return absl::ResourceExhaustedError("pattern: out of memory");
  pcre2_set_match_limit(compiled->bounds.get(), kMaxSteps);
  pcre2_set_heap_limit(compiled->bounds.get(), kMaxHeapKib);
  return FullMatch(std::move(compiled));
}

absl::StatusOr<bool> FullMatch::Matches(absl::string_view text) const {
  const std::unique_ptr<pcre2_match_data, Freer<pcre2_match_data_free>> data(
      pcre2_match_data_create(1, nullptr));
  if (data == nullptr) return absl::ResourceExhaustedError("pattern: out of memory");
  const int found = pcre2_match(code_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                text.size(), 0, 0, data.get(), code_->bounds.get());
  if (found >= 0) return true;
  if (found == PCRE2_ERROR_NOMATCH) return false;
  return absl::InvalidArgumentError(
      absl::StrCat("cannot be matched with \"", text, "\": ", Message(found)));
}

}  // namespace carrel::model
