// One version everywhere, and a changelog that can be read.
#include <regex>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

constexpr char kChangelog[] = "CHANGELOG.md";
constexpr char kWanted[] = ", the version of CMakeLists.txt";

// The first match of a pattern's first group in the file, and its line; empty if there is none.
std::string FirstMatch(const TextFile* file, const std::regex& pattern, size_t& line) {
  std::smatch match;
  line = 1;
  for (size_t i = 0; file != nullptr && i < file->lines.size(); ++i) {
    if (!std::regex_search(file->lines[i], match, pattern)) continue;
    line = i + 1;
    return match[1].str();
  }
  return "";
}

std::string LibraryVersion(const TextFile* header) {
  std::string version;
  for (const char* part : {"MAJOR", "MINOR", "PATCH"}) {
    size_t line = 0;
    const std::regex macro(absl::StrCat("#define CARREL_VERSION_", part, " ([0-9]+)"));
    absl::StrAppend(&version, version.empty() ? "" : ".", FirstMatch(header, macro, line));
  }
  return version;
}

}  // namespace

Violations CheckVersions(const Tree& tree) {
  static const std::regex project("^project\\(carrel VERSION ([0-9.]+)");
  static const std::regex program("kVersion\\[\\] = \"([^\"]*)\"");
  static const std::regex entry("^## ([0-9.]+)");
  static const std::regex image("\\bcarrel:([0-9]+\\.[0-9]+\\.[0-9]+)");
  size_t line = 0;
  const std::string version = FirstMatch(tree.Find("CMakeLists.txt"), project, line);
  if (version.empty()) return {"CMakeLists.txt: no project(carrel VERSION ..)"};
  Violations violations;
  const auto compare = [&](const std::string& path, size_t at, const std::string& found) {
    if (found != version)
      violations.push_back(absl::StrCat(path, ":", at, ": ", found, " is not ", version, kWanted));
  };
  for (const auto& [path, pattern] :
       {std::pair<std::string, const std::regex&>{"common/version.h", program},
        {kChangelog, entry}}) {
    const std::string found = FirstMatch(tree.Find(path), pattern, line);
    compare(path, line, found);
  }
  const std::string header = "include/carrel/version.h";
  compare(header, 1, LibraryVersion(tree.Find(header)));
  std::smatch match;
  for (const TextFile& file : tree.files) {
    if (file.IsSource() || !absl::StrContains(file.text, "carrel:")) continue;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      if (std::regex_search(file.lines[i], match, image)) compare(file.path, i + 1, match[1].str());
    }
  }
  return violations;
}

Violations CheckChangelog(const Tree& tree) {
  static const std::set<std::string> sections = {"### Added", "### Changed", "### Fixed",
                                                 "### Removed"};
  const TextFile* const file = tree.Find(kChangelog);
  if (file == nullptr) return {absl::StrCat(kChangelog, " is not there")};
  Violations violations;
  std::string section;
  for (size_t i = 0; i < file->lines.size(); ++i) {
    const std::string& line = file->lines[i];
    const auto add = [&](absl::string_view what) { violations.push_back(At(*file, i + 1, what)); };
    if (absl::StartsWith(line, "## ")) section.clear();
    if (absl::StartsWith(line, "### ")) {
      section = line;
      if (!sections.contains(line)) add("a section is Added, Changed, Fixed or Removed");
    }
    if (absl::StartsWith(line, "  ")) add("an entry is one line");
    if (!absl::StartsWith(line, "- ")) continue;
    if (section.empty()) add("an entry stands in a section");
    if (Characters(line) > kMostEntryCharacters)
      add(absl::StrCat("an entry has at most ", kMostEntryCharacters, " characters"));
  }
  return violations;
}

}  // namespace carrel::tidy
