#include "kvstore/access/kept_name.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/checksum.h"

namespace carrel::kvstore {
namespace {

constexpr absl::string_view kKept = "kept-";
constexpr size_t kDigits = 12;

std::string TagOf(absl::string_view who) { return Sha256Hex(who).substr(0, kDigits); }

// Takes twelve digits off the end; empty: there are none.
absl::string_view TakeDigits(absl::string_view& name) {
  if (name.size() < kDigits) return "";
  const absl::string_view digits = name.substr(name.size() - kDigits);
  if (!std::all_of(digits.begin(), digits.end(),
                   [](char c) { return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f'); })) {
    return "";
  }
  name.remove_suffix(kDigits);
  return digits;
}

struct Parts {
  bool kept = false;
  absl::string_view prefix, who;
};

Parts PartsOf(absl::string_view context) {
  Parts parts;
  absl::string_view rest = context;
  if (TakeDigits(rest).empty()) return parts;
  if (rest == kKept) return {.kept = true};
  if (!absl::ConsumeSuffix(&rest, "-")) return parts;
  parts.who = TakeDigits(rest);
  if (parts.who.empty() || !absl::ConsumeSuffix(&rest, kKept)) return parts;
  parts.kept = true;
  parts.prefix = rest;
  return parts;
}

}  // namespace

std::string KeptName(absl::string_view prefix, absl::string_view who, absl::string_view digest) {
  digest = digest.substr(0, kDigits);
  if (who.empty()) return absl::StrCat(kKept, digest);
  return absl::StrCat(prefix, kKept, TagOf(who), "-", digest);
}

bool IsKept(absl::string_view context) { return PartsOf(context).kept; }

bool SameKeeper(absl::string_view kept, absl::string_view other) {
  const Parts a = PartsOf(kept), b = PartsOf(other);
  return a.kept && b.kept && a.prefix == b.prefix && a.who == b.who;
}

bool KeptByAnother(absl::string_view context, absl::string_view who) {
  const Parts parts = PartsOf(context);
  return parts.kept && parts.who != TagOf(who);
}

bool IsNobodysKept(absl::string_view context) {
  const Parts parts = PartsOf(context);
  return parts.kept && parts.who.empty();
}

}  // namespace carrel::kvstore
