// Headers are contracts: they say what they are for, and who owns what they point to.
#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

// The first member that refers to what it does not own; empty if there is none.
std::string KeptReference(const TextFile& file) {
  static const std::regex member(
      "^\\s*(?:mutable |static |const )*[\\w:]+[\\w:<>, ]*"
      "(?:[*&](?: const)?|string_view|Span<[^;()]*>)\\s*(\\w+_)\\s*"
      "(?:ABSL_\\w+\\([^)]*\\)\\s*)*(?:=[^;()]*|\\{[^;]*\\})?;");
  const std::string code = CodeOnly(file.text);
  for (absl::string_view line : absl::StrSplit(code, '\n')) {
    if (!absl::StrContains(line, "_") || !absl::StrContains(line, ";")) continue;
    const std::string text(line);
    std::smatch match;
    if (std::regex_search(text, match, member)) return match[1].str();
  }
  return "";
}

// Behind "Example:" the name of a program of examples/.
bool HasExample(const Tree& tree, const TextFile& file) {
  static const std::regex program("// Example:[^#]*\\b(examples/\\w+\\.cc?)\\b");
  std::smatch match;
  return std::regex_search(file.text, match, program) && tree.Exists(match[1].str());
}

}  // namespace

Violations CheckHeaders(const Tree& tree) {
  Violations violations;
  for (const TextFile& file : tree.files) {
    if (!file.IsHeader()) continue;
    if (!absl::StartsWith(file.text, "// What:"))
      violations.push_back(At(file, 1, "a header begins with its contract, \"// What: ...\""));
    const bool is_public = absl::StartsWith(file.path, "include/carrel/") &&
                           !absl::EndsWith(file.path, "/export.h") &&
                           !absl::EndsWith(file.path, "/version.h");
    if (is_public && !HasExample(tree, file))
      violations.push_back(At(file, 1, "says no \"Example: ..\" that names a file of examples/"));
    const std::string member = KeptReference(file);
    if (!member.empty() && !absl::StrContains(file.text, "Ownership:")) {
      violations.push_back(
          At(file, 1, absl::StrCat("keeps a reference (", member, "): say \"Ownership: ...\"")));
    }
  }
  return violations;
}

}  // namespace carrel::tidy
