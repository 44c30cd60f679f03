// Decisions and lines of Markdown that are short enough to be read.
#include <cctype>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

bool IsDecision(const TextFile& file) {
  return file.Folder() == "docs/decisions" && file.Is(".md") &&
         std::isdigit(static_cast<unsigned char>(file.Name()[0])) != 0;
}

// The numbers of lines that are too long, outside tables and code fences.
std::vector<size_t> LongLines(const TextFile& file) {
  std::vector<size_t> numbers;
  bool code = false;
  for (size_t i = 0; i < file.lines.size(); ++i) {
    const absl::string_view line = absl::StripLeadingAsciiWhitespace(file.lines[i]);
    if (absl::StartsWith(line, "```")) code = !code;
    if (code || absl::StartsWith(line, "|")) continue;
    if (Characters(file.lines[i]) > kMostLineCharacters) numbers.push_back(i + 1);
  }
  return numbers;
}

}  // namespace

// Every byte but those that continue a character.
int Characters(absl::string_view line) {
  int count = 0;
  for (const char c : line) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return count;
}

Violations CheckDecisionWords(const Tree& tree) {
  Violations violations;
  size_t all = 0, decisions = 0;
  for (const TextFile& file : tree.files) {
    if (!IsDecision(file)) continue;
    const std::vector<absl::string_view> words =
        absl::StrSplit(file.text, absl::ByAnyChar(" \t\r\n"), absl::SkipEmpty());
    all += words.size();
    ++decisions;
    if (words.size() > kMostDecisionWords) {
      violations.push_back(
          At(file, 1, absl::StrCat(words.size(), " words are more than ", kMostDecisionWords)));
    }
  }
  if (all > decisions * kMostMeanDecisionWords) {
    violations.push_back(absl::StrCat("docs/decisions: ", all, " words of ", decisions,
                                      " decisions are more than ", kMostMeanDecisionWords,
                                      " in the mean"));
  }
  return violations;
}

Violations CheckLineCharacters(const Tree& tree) {
  Violations violations;
  std::map<std::string, std::string> listed = ReadExceptions(tree, kLongLines, violations);
  for (const TextFile& file : tree.files) {
    if (!file.Is(".md")) continue;
    const std::vector<size_t> lines = LongLines(file);
    int64_t most = 0;
    if (const auto it = listed.find(file.path); it != listed.end()) {
      if (!absl::SimpleAtoi(it->second, &most)) {
        most = 0;
        violations.push_back(absl::StrCat(kLongLines, ": ", file.path, " needs a number"));
      }
      listed.erase(it);
    }
    const auto count = static_cast<int64_t>(lines.size());
    if (count > most) {
      violations.push_back(
          At(file, lines.back(),
             absl::StrCat("of ", count, " lines over ", kMostLineCharacters, " characters, ", most,
                          " may be; the first is line ", lines.front())));
    }
    if (count < most) {
      violations.push_back(absl::StrCat(kLongLines, ": ", file.path, " has ", count, " of ", most,
                                        count == 0 ? ": take it out" : ": lower it"));
    }
  }
  for (const auto& [path, most] : listed) {
    violations.push_back(absl::StrCat(kLongLines, ": there is no ", path, ": take it out"));
  }
  return violations;
}

}  // namespace carrel::tidy
