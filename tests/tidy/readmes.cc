// READMEs know their folders, and documents the files that they name.
#include <cctype>
#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

bool IsNameCharacter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-';
}

// Whether the text has the name as a whole: not as the end or the beginning of another.
bool Names(absl::string_view text, absl::string_view name) {
  for (size_t at = text.find(name); at != absl::string_view::npos; at = text.find(name, at + 1)) {
    const size_t end = at + name.size();
    if ((at == 0 || !IsNameCharacter(text[at - 1])) &&
        (end == text.size() || !IsNameCharacter(text[end]))) {
      return true;
    }
  }
  return false;
}

std::string Under(absl::string_view folder, absl::string_view name) {
  return folder.empty() ? std::string(name) : absl::StrCat(folder, "/", name);
}

// A pattern of a shell: '*' is any text.
bool Matches(absl::string_view pattern, absl::string_view text) {
  const size_t star = pattern.find('*');
  if (star == absl::string_view::npos) return pattern == text;
  if (!absl::StartsWith(text, pattern.substr(0, star))) return false;
  pattern.remove_prefix(star + 1);
  for (size_t at = star; at <= text.size(); ++at) {
    if (Matches(pattern, text.substr(at))) return true;
  }
  return false;
}

// Whether some file or folder has this path, beside the document, from the root, or as its end.
bool IsThere(const Tree& tree, const TextFile& document, absl::string_view name) {
  if (absl::EndsWith(name, "/")) name.remove_suffix(1);
  if (tree.Exists(Under(document.Folder(), name)) || tree.Exists(std::string(name))) return true;
  const bool pattern = absl::StrContains(name, "*");
  const std::string ending = absl::StrCat("/", name), any = absl::StrCat("*/", name);
  for (const std::string& path : tree.paths) {
    if (pattern ? Matches(name, path) || Matches(any, path) : absl::EndsWith(path, ending))
      return true;
  }
  return false;
}

}  // namespace

Violations CheckReadmes(const Tree& tree) {
  Violations violations;
  for (const TextFile& file : tree.files) {
    const bool test_of_ours = file.Folder() == "tests" && absl::EndsWith(file.path, "_test.cc");
    if (!(file.IsHeader() || test_of_ours) || file.Folder().empty()) continue;
    const std::string folder = file.Folder();
    if (const TextFile* readme = tree.Find(folder + "/README.md"); readme != nullptr) {
      if (!Names(readme->text, file.Name()))
        violations.push_back(At(*readme, 1, absl::StrCat("does not name ", file.Name())));
      continue;
    }
    // The nearest README above names the folder, from where it stands.
    size_t slash = folder.rfind('/');
    const TextFile* above = nullptr;
    while (slash != std::string::npos && above == nullptr) {
      above = tree.Find(folder.substr(0, slash) + "/README.md");
      if (above == nullptr) slash = slash == 0 ? std::string::npos : folder.rfind('/', slash - 1);
    }
    if (above == nullptr || !Names(above->text, folder.substr(slash + 1)))
      violations.push_back(At(file, 1, "no README.md names this header or its folder"));
  }
  return violations;
}

Violations CheckNamedFiles(const Tree& tree) {
  static const std::regex code("`([^`]+)`");
  static const std::regex name(
      "([A-Za-z0-9_.*-]+/)*[A-Za-z0-9_*-][A-Za-z0-9_.*-]*\\.(h|cc|cu|cuh|proto)");
  Violations violations;
  for (const TextFile& file : tree.files) {
    if (!file.Is(".md") || file.path == "CHANGELOG.md") continue;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const std::string& line = file.lines[i];
      for (std::sregex_iterator it(line.begin(), line.end(), code), end; it != end; ++it) {
        const std::string text = (*it)[1].str();
        if (std::regex_match(text, name) && !IsThere(tree, file, text))
          violations.push_back(At(file, i + 1, absl::StrCat("there is no ", text)));
      }
    }
  }
  return violations;
}

}  // namespace carrel::tidy
