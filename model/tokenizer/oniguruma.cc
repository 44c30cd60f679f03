// Rewrites an Oniguruma (Ruby syntax) pattern for PCRE2; see split_pattern.h.
#include <cctype>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/tokenizer/split_pattern.h"

namespace carrel::model {
namespace {

class Translator {
 public:
  explicit Translator(absl::string_view pattern) : pattern_(pattern) {}

  absl::StatusOr<std::string> Run() {
    while (at_ < pattern_.size()) RETURN_IF_ERROR(TakeOne());
    return std::move(out_);
  }

 private:
  absl::string_view Rest() const { return pattern_.substr(at_); }

  absl::Status Refuse(absl::string_view construct) const {
    return absl::UnimplementedError(absl::StrCat("pattern \"", Shown(pattern_), "\": ", construct,
                                                 " at offset ", at_, " is not supported"));
  }

  void Copy(size_t count) {
    absl::StrAppend(&out_, pattern_.substr(at_, count));
    at_ += count;
  }

  absl::Status TakeOne() {
    switch (pattern_[at_]) {
      case '\\':
        return TakeEscape();
      case '[':
        return TakeClass();
      case '(':
        return TakeGroup();
      case '{':
        return TakeBrace();
      case '^':
      case '$':
        return Refuse(absl::StrCat("the anchor ", pattern_.substr(at_, 1)));
      default:
        Copy(1);
        return absl::OkStatus();
    }
  }

  absl::Status TakeGroup() {
    if (absl::StartsWith(Rest(), "(*")) return Refuse("(*");
    if (!absl::StartsWith(Rest(), "(?")) {
      Copy(1);
      return absl::OkStatus();
    }
    // (?i) without a colon reaches over alternatives in PCRE2 but not in Ruby syntax.
    for (absl::string_view opening :
         {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?-i:"}) {
      if (absl::StartsWith(Rest(), opening)) {
        Copy(opening.size());
        return absl::OkStatus();
      }
    }
    return Refuse(absl::StrCat("the group ", Rest().substr(0, 4)));
  }

  // {n}, {n,} or {n,m}; a brace that is none of them is a literal in both.
  absl::Status TakeBrace() {
    size_t end = at_ + 1;
    while (end < pattern_.size() &&
           (std::isdigit(static_cast<unsigned char>(pattern_[end])) || pattern_[end] == ',')) {
      ++end;
    }
    const bool quantifier = end < pattern_.size() && pattern_[end] == '}' && end > at_ + 1;
    if (quantifier) {
      if (pattern_[at_ + 1] == ',') return Refuse("{,n}");
      // Ruby repeats the repetition where PCRE2 makes it possessive.
      if (end + 1 < pattern_.size() && pattern_[end + 1] == '+') return Refuse("{n,m}+");
    }
    Copy(quantifier ? end + 1 - at_ : 1);
    return absl::OkStatus();
  }

  absl::Status TakeClass() {
    Copy(1);
    if (absl::StartsWith(Rest(), "^")) Copy(1);
    if (absl::StartsWith(Rest(), "]")) return Refuse("a character class that begins with ]");
    while (at_ < pattern_.size() && pattern_[at_] != ']') {
      if (pattern_[at_] == '[') return Refuse("a nested character class");
      if (absl::StartsWith(Rest(), "&&")) return Refuse("a class intersection (&&)");
      if (pattern_[at_] == '\\') {
        RETURN_IF_ERROR(TakeEscape());
      } else {
        Copy(1);
      }
    }
    if (at_ == pattern_.size()) return Refuse("an unterminated character class");
    Copy(1);
    return absl::OkStatus();
  }

  absl::Status TakeEscape() {
    if (at_ + 1 == pattern_.size()) return Refuse("a backslash at the end");
    const char c = pattern_[at_ + 1];
    switch (c) {
      case 's':  // PCRE2's \s holds U+180E, which has not been white space since Unicode 6.3
        absl::StrAppend(&out_, "\\p{White_Space}");
        at_ += 2;
        return absl::OkStatus();
      case 'S':
        absl::StrAppend(&out_, "\\P{White_Space}");
        at_ += 2;
        return absl::OkStatus();
      case 'v':  // one character in Oniguruma, a class in PCRE2
        absl::StrAppend(&out_, "\\x{0b}");
        at_ += 2;
        return absl::OkStatus();
      case 'u':
        return TakeHex(4);
      case 'x':
        return TakeHex(2);
      case 'p':
      case 'P':
        if (at_ + 2 == pattern_.size() || pattern_[at_ + 2] != '{') return Refuse("\\p without {");
        Copy(2);
        return absl::OkStatus();
      default:
        break;
    }
    if (absl::StrContains("dDtnrfae", absl::string_view(&c, 1)) ||
        !std::isalnum(static_cast<unsigned char>(c))) {
      Copy(2);
      return absl::OkStatus();
    }
    return Refuse(absl::StrCat("\\", absl::string_view(&c, 1)));
  }

  // \uHHHH, \xHH and \x{H...}, all as \x{H...}.
  absl::Status TakeHex(size_t digits) {
    size_t begin = at_ + 2;
    size_t end = begin;
    const bool braced = digits == 2 && begin < pattern_.size() && pattern_[begin] == '{';
    if (braced) end = ++begin;
    while (end < pattern_.size() && std::isxdigit(static_cast<unsigned char>(pattern_[end])) &&
           end - begin < (braced ? 8 : digits)) {
      ++end;
    }
    const bool closed = !braced || (end < pattern_.size() && pattern_[end] == '}');
    if (end == begin || !closed || (!braced && end - begin != digits)) {
      return Refuse("a malformed hexadecimal escape");
    }
    const absl::string_view hex = pattern_.substr(begin, end - begin);
    // Oniguruma takes \x80 and above for a raw byte.
    if (digits == 2 && !braced && hex[0] > '7') return Refuse("\\xHH above 7F");
    absl::StrAppend(&out_, "\\x{", hex, "}");
    at_ = end + (braced ? 1 : 0);
    return absl::OkStatus();
  }

  const absl::string_view pattern_;
  size_t at_ = 0;
  std::string out_;
};

}  // namespace

absl::StatusOr<std::string> TranslateOniguruma(absl::string_view pattern) {
  return Translator(pattern).Run();
}

}  // namespace carrel::model
