// Members that documents name as `Class::Member` are there.
#include <map>
#include <regex>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

// Files by the classes, structs and enums that they define.
std::map<std::string, std::vector<const TextFile*>> Definitions(const Tree& tree,
                                                                const std::set<std::string>& of) {
  static const std::regex scope("\\b(?:class|struct|enum|message) (?:class |[A-Z_]+ )?([A-Z]\\w*)");
  std::map<std::string, std::vector<const TextFile*>> files;
  for (const TextFile& file : tree.files) {
    if (!file.IsSource() && !file.Is(".proto")) continue;
    for (std::sregex_iterator it(file.text.begin(), file.text.end(), scope), end; it != end; ++it) {
      if (of.contains((*it)[1].str())) files[(*it)[1].str()].push_back(&file);
    }
  }
  return files;
}

bool HasWord(const std::vector<const TextFile*>& files, const std::string& word) {
  const std::regex pattern(absl::StrCat("\\b", word, "\\b"));
  for (const TextFile* const file : files) {
    if (absl::StrContains(file->text, word) && std::regex_search(file->text, pattern)) return true;
  }
  return false;
}

}  // namespace

Violations CheckNamedMembers(const Tree& tree) {
  // "absl::Mutex::Lock" is a library's; "carrel::Want::kRows" and "kvstore::Engine::Open" are ours.
  static const std::regex member("`[^`]*?(\\b[a-z]\\w*::)?\\b([A-Z]\\w*)::(\\w+)[^`]*`");
  static const std::set<std::string> foreign = {
      "absl::", "boost::", "grpc::", "rocksdb::", "std::"};
  struct Named {
    const TextFile* file;
    size_t line;
    std::string scope, name;
  };
  std::vector<Named> all;
  std::set<std::string> scopes;
  for (const TextFile& file : tree.files) {
    if (!file.Is(".md") || file.path == "CHANGELOG.md") continue;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const std::string& line = file.lines[i];
      if (!absl::StrContains(line, "::")) continue;
      for (std::sregex_iterator it(line.begin(), line.end(), member), end; it != end; ++it) {
        if (foreign.contains((*it)[1].str())) continue;
        all.push_back({&file, i + 1, (*it)[2].str(), (*it)[3].str()});
        scopes.insert((*it)[2].str());
      }
    }
  }
  const auto definitions = Definitions(tree, scopes);
  Violations violations;
  for (const Named& one : all) {
    const auto it = definitions.find(one.scope);
    if (it != definitions.end() && HasWord(it->second, one.name)) continue;
    violations.push_back(
        At(*one.file, one.line, absl::StrCat("there is no ", one.scope, "::", one.name)));
  }
  return violations;
}

}  // namespace carrel::tidy
