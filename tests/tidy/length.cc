// Functions and files that are short enough to be read. A small parser of C++ finds functions: it knows
// braces, not types.
#include <cctype>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

bool IsWord(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Behind the group that opens at `at`, or the end.
size_t PastGroup(absl::string_view text, size_t at, char open, char close) {
  for (int depth = 0; at < text.size(); ++at) {
    if (text[at] == open) ++depth;
    if (text[at] == close && --depth == 0) return at + 1;
  }
  return text.size();
}

// What stands before a brace, without templates and access specifiers.
absl::string_view Head(absl::string_view head) {
  head = absl::StripAsciiWhitespace(head);
  while (absl::StartsWith(head, "template")) {
    const size_t open = head.find('<');
    if (open == absl::string_view::npos) break;
    head = absl::StripAsciiWhitespace(head.substr(PastGroup(head, open, '<', '>')));
  }
  return head;
}

bool IsMacroOrAttribute(absl::string_view word) {
  if (word == "alignas" || word == "__launch_bounds__" || word == "__attribute__" ||
      word == "decltype" || word == "requires" || word == "explicit") {
    return true;
  }
  if (absl::StartsWith(word, "TEST") || absl::StartsWith(word, "TYPED_TEST")) return false;
  bool upper = word.size() > 2;
  for (const char c : word) upper = upper && !std::islower(static_cast<unsigned char>(c));
  return upper;
}

// The position of the parenthesis that opens the parameters; npos if there is none.
size_t Parameters(absl::string_view head) {
  for (size_t at = 0; at < head.size(); ++at) {
    if (head[at] == '=' && !absl::StrContains(head.substr(0, at), "operator")) break;
    if (head[at] != '(') continue;
    if (absl::EndsWith(absl::StripTrailingAsciiWhitespace(head.substr(0, at)), "operator")) {
      ++at;  // operator()
      continue;
    }
    size_t end = at;
    while (end > 0 && head[end - 1] == ' ') --end;
    size_t begin = end;
    while (begin > 0 && IsWord(head[begin - 1])) --begin;
    const absl::string_view word = head.substr(begin, end - begin);
    if (!IsMacroOrAttribute(word)) return at;
    at = PastGroup(head, at, '(', ')') - 1;
  }
  return absl::string_view::npos;
}

std::string NameOf(absl::string_view head) {
  head = Head(head);
  const size_t open = Parameters(head);
  size_t end = open;
  while (end > 0 && head[end - 1] == ' ') --end;
  size_t begin = end;
  while (begin > 0 && (IsWord(head[begin - 1]) || head[begin - 1] == ':' || head[begin - 1] == '~'))
    --begin;
  std::string name(absl::StripPrefix(head.substr(begin, end - begin), "::"));
  if (absl::StrContains(name, "TEST")) {
    name.clear();
    for (const char c : head.substr(open + 1, head.find(')', open) - open - 1)) {
      if (c == ',') name += '.';
      if (IsWord(c)) name += c;
    }
  }
  const size_t is_operator = head.substr(0, open).rfind("operator");
  if (is_operator != absl::string_view::npos && is_operator >= begin) return "operator";
  return name.empty() ? "operator" : name;
}

enum class Block { kScope, kFunction, kValue };

// What a brace opens, by what stands before it.
Block KindOf(absl::string_view text) {
  const absl::string_view head = Head(text);
  for (const char* word : {"namespace", "inline namespace"}) {
    if (absl::StartsWith(head, word)) return Block::kScope;
  }
  const size_t open = Parameters(head);
  if (head == "extern") return Block::kScope;  // its "C" is blank
  if (open == absl::string_view::npos) {
    if (absl::StartsWith(head, "enum") || absl::StrContains(head, "=")) return Block::kValue;
    for (const char* word : {"class ", "struct ", "union "}) {
      if (absl::StrContains(head, word) || absl::StartsWith(head, absl::StripSuffix(word, " ")))
        return Block::kScope;
    }
    return Block::kValue;
  }
  // Behind the parameters: members that are initialised with braces are no bodies.
  const absl::string_view after = head.substr(PastGroup(head, open, '(', ')'));
  size_t colon = after.find(':');
  while (colon != absl::string_view::npos && colon + 1 < after.size() && after[colon + 1] == ':')
    colon = after.find(':', colon + 2);
  const char last = head.back();
  if (colon != absl::string_view::npos && (IsWord(last) || last == '>')) return Block::kValue;
  return Block::kFunction;
}

class FunctionFinder {
 public:
  explicit FunctionFinder(absl::string_view text) : text_(CodeOnly(text)) {}

  std::vector<Function> Run() && {
    for (at_ = 0; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '\n') ++line_;
      if (c == '{') {
        Open();
      } else if (c == '}') {
        Close();
      } else if (AtScope()) {
        Between(c);
      }
    }
    return std::move(functions_);
  }

 private:
  bool AtScope() const { return open_.empty() || open_.back() == Block::kScope; }

  // A character between declarations.
  void Between(char c) {
    if (c == '(') ++parentheses_;
    if (c == ')') --parentheses_;
    if (parentheses_ > 0) return;
    const absl::string_view head =
        absl::StripAsciiWhitespace(absl::string_view(text_).substr(head_, at_ - head_));
    const bool access = c == ':' && (head == "public" || head == "private" || head == "protected");
    if (c == ';' || access) head_ = at_ + 1;
  }

  void Open() {
    Block kind = Block::kValue;
    if (AtScope() && parentheses_ == 0) {
      const absl::string_view head = absl::string_view(text_).substr(head_, at_ - head_);
      kind = KindOf(head);
      if (kind == Block::kFunction) Begin(head);
      if (kind == Block::kScope) head_ = at_ + 1;
    }
    open_.push_back(kind);
  }

  void Begin(absl::string_view head) {
    int line = line_;
    const size_t first = head.find_first_not_of(" \n");
    for (const char c : head.substr(first)) line -= c == '\n';
    functions_.push_back({.name = NameOf(head), .first_line = line});
  }

  void Close() {
    if (open_.empty()) return;
    const Block kind = open_.back();
    open_.pop_back();
    if (!AtScope()) return;
    if (kind == Block::kFunction) functions_.back().last_line = line_;
    if (kind != Block::kValue) head_ = at_ + 1;
  }

  const std::string text_;
  size_t at_ = 0, head_ = 0;
  int line_ = 1, parentheses_ = 0;
  std::vector<Block> open_;
  std::vector<Function> functions_;
};

// Everything that is too long must be listed, and nothing else.
void Compare(const std::map<std::string, int>& lengths, int most, const char* list,
             const Tree& tree, Violations& violations) {
  const std::map<std::string, std::string> listed = ReadExceptions(tree, list, violations);
  for (const auto& [key, lines] : lengths) {
    if (lines > most && !listed.contains(key))
      violations.push_back(absl::StrCat(key, ": ", lines, " lines are more than ", most));
    if (lines <= most && listed.contains(key))
      violations.push_back(absl::StrCat(list, ": ", key, " has ", lines, " lines: take it out"));
  }
  for (const auto& [key, reason] : listed) {
    if (!lengths.contains(key))
      violations.push_back(absl::StrCat(list, ": there is no ", key, ": take it out"));
  }
}

}  // namespace

std::vector<Function> FunctionsOf(absl::string_view text) { return FunctionFinder(text).Run(); }

Violations CheckFunctionLengths(const Tree& tree) {
  Violations violations;
  std::map<std::string, int> lengths;
  for (const TextFile& file : tree.files) {
    if (!file.IsSource()) continue;
    for (const Function& function : FunctionsOf(file.text)) {
      int& lines = lengths[absl::StrCat(file.path, ":", function.name)];
      lines = std::max(lines, function.last_line - function.first_line + 1);
    }
  }
  Compare(lengths, kMostFunctionLines, kLongFunctions, tree, violations);
  return violations;
}

Violations CheckFileLengths(const Tree& tree) {
  Violations violations;
  std::map<std::string, int> lengths;
  for (const TextFile& file : tree.files) {
    if (file.IsSource()) lengths[file.path] = static_cast<int>(file.lines.size()) - 1;
  }
  Compare(lengths, kMostFileLines, kLongFiles, tree, violations);
  return violations;
}

std::map<std::string, std::string> ReadExceptions(const Tree& tree, const std::string& path,
                                                  Violations& violations) {
  std::map<std::string, std::string> exceptions;
  const TextFile* file = tree.Find(path);
  if (file == nullptr) return exceptions;
  for (size_t i = 0; i < file->lines.size(); ++i) {
    const absl::string_view line = absl::StripAsciiWhitespace(file->lines[i]);
    if (line.empty() || line[0] == '#') continue;
    const size_t space = line.find(' ');
    if (space == absl::string_view::npos) {
      violations.push_back(At(*file, i + 1, "an exception needs a reason"));
      continue;
    }
    exceptions.emplace(line.substr(0, space), absl::StripAsciiWhitespace(line.substr(space)));
  }
  return exceptions;
}

}  // namespace carrel::tidy
