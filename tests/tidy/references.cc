// What documents and comments refer to exists: links, headings, decisions, sections, documents.
#include <algorithm>
#include <cctype>
#include <filesystem>
#include <functional>
#include <regex>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

// Texts that people read. Lists of exceptions and documents to ask about are none, nor are the
// made-up trees of our own test.
bool IsRead(const TextFile& file) {
  if (file.path == "tests/tidy/rules_test.cc") return false;
  return !file.Is(".txt") || absl::EndsWith(file.path, "CMakeLists.txt");
}

// Line i with the beginning of the next one, for what is broken over two.
std::string WithNext(const TextFile& file, size_t i) {
  std::string text = file.lines[i];
  if (i + 1 >= file.lines.size()) return text;
  absl::string_view next = absl::StripAsciiWhitespace(file.lines[i + 1]);
  for (const char* leader : {"//", "#", "- "}) next = absl::StripPrefix(next, leader);
  return absl::StrCat(text, " ", absl::StripAsciiWhitespace(next));
}

// Calls take for every match that begins in line i.
void EachMatch(const TextFile& file, const std::regex& pattern, absl::string_view hint,
               const std::function<void(size_t, const std::smatch&)>& take) {
  if (!absl::StrContains(file.text, hint)) return;
  for (size_t i = 0; i < file.lines.size(); ++i) {
    const std::string text = WithNext(file, i);
    if (!absl::StrContains(text, hint)) continue;
    for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) {
      if (it->position() < static_cast<std::ptrdiff_t>(file.lines[i].size())) take(i + 1, *it);
    }
  }
}

// Headings without their marks.
std::vector<std::string> Headings(const TextFile& file) {
  std::vector<std::string> headings;
  bool code = false;
  for (const std::string& line : file.lines) {
    if (absl::StartsWith(line, "```")) code = !code;
    if (code || !absl::StartsWith(line, "#")) continue;
    headings.emplace_back(absl::StripAsciiWhitespace(
        absl::string_view(line).substr(std::min(line.size(), line.find_first_not_of('#')))));
  }
  return headings;
}

// The name that a heading has in links: lower case, without marks, dashes for blanks.
std::string Anchor(absl::string_view heading) {
  std::string anchor;
  for (const char c : heading) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-')
      anchor += absl::ascii_tolower(static_cast<unsigned char>(c));
    if (c == ' ') anchor += '-';
  }
  return anchor;
}

bool HasAnchor(const TextFile& document, absl::string_view anchor) {
  for (const std::string& heading : Headings(document)) {
    if (Anchor(heading) == anchor) return true;
  }
  return false;
}

// Whether a heading is "N. Title", by its number or by its title.
bool HasSection(const TextFile& document, const std::string& section) {
  for (const std::string& heading : Headings(document)) {
    if (heading == section || absl::StartsWith(heading, section + ".") ||
        absl::EndsWith(heading, ". " + section)) {
      return true;
    }
  }
  return false;
}

// "Paper (docs/methods.md), section 3" is the paper's section; "[text](docs/methods.md), section 3"
// is the document's.
bool IsInParentheses(const std::smatch& match) {
  const std::string before = match.prefix().str(), path = match[1].str();
  const size_t begin = before.find_last_not_of("/.-_abcdefghijklmnopqrstuvwxyz");
  const std::string whole = match[0].str();
  return whole.size() > path.size() && whole[path.size()] == ')' && begin != std::string::npos &&
         before[begin] == '(' && (begin == 0 || before[begin - 1] != ']');
}

// The document of that name: beside the file, in docs/, in the root, or wherever it is alone.
const TextFile* Document(const Tree& tree, const TextFile& from, const std::string& name) {
  const std::string folder = from.Folder();
  for (const std::string& path :
       {folder.empty() ? name : folder + "/" + name, "docs/" + name, name}) {
    const auto normal = std::filesystem::path(path).lexically_normal().generic_string();
    if (const TextFile* found = tree.Find(normal); found != nullptr) return found;
  }
  for (const TextFile& file : tree.files) {
    if (absl::EndsWith(file.path, "/" + name)) return &file;
  }
  return nullptr;
}

// A link's fault; empty if there is none.
std::string FaultOfLink(const Tree& tree, const TextFile& file, const std::string& link) {
  if (absl::StrContains(link, ":")) return "";  // of another host
  const size_t hash = link.find('#');
  const std::string to = link.substr(0, hash);
  std::string path = file.path;
  if (!to.empty()) {
    path = (std::filesystem::path(file.Folder()) / to).lexically_normal().generic_string();
    if (absl::EndsWith(path, "/")) path.pop_back();
    if (!tree.Exists(path)) return absl::StrCat("leads nowhere: ", link);
  }
  const TextFile* target = tree.Find(path);
  if (hash == std::string::npos || target == nullptr) return "";
  if (HasAnchor(*target, absl::string_view(link).substr(hash + 1))) return "";
  return absl::StrCat("no such heading: ", link);
}

void CheckNumberedSections(const TextFile& file, Violations& violations) {
  static const std::regex pattern("[Ss]ections? ([0-9]+)\\b");
  bool numbered = false;
  for (const std::string& heading : Headings(file)) {
    numbered = numbered || absl::StartsWith(heading, "1. ");
  }
  if (!file.Is(".md") || !numbered) return;
  EachMatch(file, pattern, "ection", [&](size_t line, const std::smatch& match) {
    if (!HasSection(file, match[1].str()))
      violations.push_back(At(file, line, absl::StrCat("there is no ", match[0].str())));
  });
}

}  // namespace

Violations CheckLinks(const Tree& tree) {
  static const std::regex pattern("\\]\\(([^()\\s]+)\\)");
  Violations violations;
  for (const TextFile& file : tree.files) {
    if (!file.Is(".md")) continue;
    bool code = false;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const std::string& line = file.lines[i];
      if (absl::StartsWith(line, "```")) code = !code;
      if (code || !absl::StrContains(line, "](")) continue;
      for (std::sregex_iterator it(line.begin(), line.end(), pattern), end; it != end; ++it) {
        const std::string fault = FaultOfLink(tree, file, (*it)[1].str());
        if (!fault.empty()) violations.push_back(At(file, i + 1, fault));
      }
    }
  }
  return violations;
}

Violations CheckDecisions(const Tree& tree) {
  static const std::regex pattern(
      "ecisions?[/ ]([0-9]{3}\\b(?:(?:,| and| to|, and) [0-9]{3}\\b)*)");
  static const std::regex number("[0-9]{3}");
  std::set<std::string> numbers;
  for (const std::string& path : tree.paths) {
    if (absl::StartsWith(path, "docs/decisions/")) numbers.insert(path.substr(15, 3));
  }
  Violations violations;
  for (const TextFile& file : tree.files) {
    if (!IsRead(file)) continue;
    EachMatch(file, pattern, "ecision", [&](size_t line, const std::smatch& match) {
      const std::string list = match[1].str();
      for (std::sregex_iterator it(list.begin(), list.end(), number), end; it != end; ++it) {
        if (!numbers.contains(it->str()))
          violations.push_back(At(file, line, absl::StrCat("there is no decision ", it->str())));
      }
    });
  }
  return violations;
}

Violations CheckSections(const Tree& tree) {
  // "docs/formats.md, section 4", "methods.md, C", "trust.md](trust.md), \"Title\"", "architecture
  // section 5", "methods F".
  static const std::regex document("(out/[a-z]+/)?([A-Za-z0-9_-]+\\.md)\\b");
  static const std::regex section(
      "([A-Za-z0-9_-]+\\.md)[)`]?(?:,? section |, | )(?:([0-9]+|[A-Z])(?= to "
      "|[,.;:)]|$)|\"([^\"]+)\")");
  static const std::regex loose(
      "\\b(architecture|formats|methods)"
      "(?:,? section ([0-9A-Z]+)|,? ([A-Z])(?=[,.;:)]|$| to ))");
  static const std::regex paper("\\bpaper [0-9]{3}\\b");
  Violations violations;
  for (const TextFile& file : tree.files) {
    if (!IsRead(file)) continue;
    const auto add = [&](size_t line, const std::string& what) {
      violations.push_back(At(file, line, what));
    };
    EachMatch(file, document, ".md", [&](size_t line, const std::smatch& match) {
      if (!match[1].matched && Document(tree, file, match[2].str()) == nullptr)
        add(line, absl::StrCat("there is no document ", match[2].str()));
    });
    EachMatch(file, section, ".md", [&](size_t line, const std::smatch& match) {
      const TextFile* found = Document(tree, file, match[1].str());
      const std::string name = match[2].matched ? match[2].str() : match[3].str();
      if (found != nullptr && !IsInParentheses(match) && !HasSection(*found, name))
        add(line, absl::StrCat(found->path, " has no section ", name));
    });
    for (const char* hint : {"architecture", "formats", "methods"}) {
      EachMatch(file, loose, hint, [&](size_t line, const std::smatch& match) {
        if (match[1].str() != hint) return;
        const TextFile* found = tree.Find(absl::StrCat("docs/", hint, ".md"));
        const std::string name = match[2].matched ? match[2].str() : match[3].str();
        if (found == nullptr || !HasSection(*found, name))
          add(line, absl::StrCat("docs/", hint, ".md has no section ", name));
      });
    }
    EachMatch(file, paper, "paper ", [&](size_t line, const std::smatch& match) {
      add(line, absl::StrCat("say which: ", match[0].str()));
    });
    CheckNumberedSections(file, violations);
  }
  return violations;
}

}  // namespace carrel::tidy
