// A decision that another one changed says so, and that one says what it changed.
#include <regex>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

struct Pair {
  const char* passive;
  const char* active;
};
constexpr Pair kPairs[] = {{"Overruled by", "Overrules"},
                           {"Replaced by", "Replaces"},
                           {"Superseded by", "Supersedes"},
                           {"Amended by", "Amends"}};

// The numbers behind the words, in links or plain: "Replaced by 041, 042".
std::set<std::string> NumbersBehind(const TextFile& file, const std::string& words) {
  const std::regex pattern("\\b" + words +
                           "((?:,? ?(?:and )?\\[?(?:decision )?[0-9]{3}(?:\\]\\([^)]*\\))?)+)");
  static const std::regex number("[ \\[]([0-9]{3})\\b");
  std::set<std::string> numbers;
  for (const std::string& line : file.lines) {
    for (std::sregex_iterator it(line.begin(), line.end(), pattern), end; it != end; ++it) {
      const std::string list = (*it)[1].str();
      for (std::sregex_iterator n(list.begin(), list.end(), number); n != end; ++n) {
        numbers.insert((*n)[1].str());
      }
    }
  }
  return numbers;
}

const TextFile* Decision(const Tree& tree, const std::string& number) {
  for (const TextFile& file : tree.files) {
    if (absl::StartsWith(file.path, absl::StrCat("docs/decisions/", number, "-"))) return &file;
  }
  return nullptr;
}

}  // namespace

Violations CheckOverruled(const Tree& tree) {
  Violations violations;
  for (const TextFile& file : tree.files) {
    if (!absl::StartsWith(file.path, "docs/decisions/")) continue;
    const std::string own = file.Name().substr(0, 3);
    for (const Pair& pair : kPairs) {
      for (const auto& [said, wanted] :
           {std::pair(pair.passive, pair.active), std::pair(pair.active, pair.passive)}) {
        for (const std::string& number : NumbersBehind(file, said)) {
          const TextFile* other = Decision(tree, number);
          if (other == nullptr || !NumbersBehind(*other, wanted).contains(own)) {
            violations.push_back(
                At(file, 1,
                   absl::StrCat(said, " ", number, ", which does not say ", wanted, " ", own)));
          }
        }
      }
    }
  }
  return violations;
}

}  // namespace carrel::tidy
