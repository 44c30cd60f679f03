// docs/trace.md names functions that are there, in the order in which they are called.
#include <cctype>
#include <regex>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

constexpr char kMend[] =
    ": name the function that does this now and its file, or take the step out and number the "
    "others "
    "anew";

struct TraceStep {
  size_t line = 0;
  int number = 0;
  std::string function, file;
  std::string Plain() const { return function.substr(function.rfind(':') + 1); }
  std::string Class() const {
    const size_t colons = function.rfind("::");
    return colons == std::string::npos ? "" : function.substr(0, colons);
  }
};

// The rows "| N | `Class::Function` | `path` | thread | sentence |" of its tables.
std::vector<TraceStep> StepsOf(const TextFile& page) {
  static const std::regex row("\\| *([0-9]+) *\\| `([A-Za-z0-9_:]+)` *\\| `([^`]+)` *\\|.*");
  std::vector<TraceStep> steps;
  std::smatch match;
  for (size_t i = 0; i < page.lines.size(); ++i) {
    if (!std::regex_match(page.lines[i], match, row)) continue;
    TraceStep step = {.line = i + 1, .function = match[2].str(), .file = match[3].str()};
    if (absl::SimpleAtoi(match[1].str(), &step.number)) steps.push_back(std::move(step));
  }
  return steps;
}

// How often the name stands before a parenthesis: where it is defined, declared and called.
int Mentions(absl::string_view code, const std::string& name) {
  const std::string call = name + "(";
  int count = 0;
  for (size_t at = code.find(call); at != code.npos; at = code.find(call, at + 1)) {
    const char before = at == 0 ? ' ' : code[at - 1];
    count += std::isalnum(static_cast<unsigned char>(before)) == 0 && before != '_';
  }
  return count;
}

// A member that is defined within its class stands there without the class's name.
bool Defines(const TextFile& file, const TraceStep& step) {
  const std::regex scope(absl::StrCat("\\b(class|struct) ", step.Class(), "\\b"));
  const bool in_class = !step.Class().empty() && std::regex_search(file.text, scope);
  for (const Function& function : FunctionsOf(file.text)) {
    if (function.name == step.function) return true;
    if (in_class && function.name == step.Plain()) return true;
  }
  return file.IsHeader() && in_class && Mentions(CodeOnly(file.text), step.Plain()) > 0;
}

}  // namespace

Violations CheckTrace(const Tree& tree) {
  Violations violations;
  const TextFile* const page = tree.Find(kTracePage);
  if (page == nullptr) return {absl::StrCat(kTracePage, " is not there")};
  const std::vector<TraceStep> steps = StepsOf(*page);
  if (steps.empty()) return {absl::StrCat(kTracePage, ": no row of a table is a step")};
  std::string code;  // of the files so far
  std::set<std::string> read;
  int number = 0;
  for (const TraceStep& step : steps) {
    const auto add = [&](absl::string_view what) {
      violations.push_back(At(*page, step.line, absl::StrCat("step ", step.number, ": ", what)));
    };
    if (step.number != ++number) add(absl::StrCat("is step ", number, " of the page"));
    const TextFile* const file = tree.Find(step.file);
    if (file == nullptr) {
      add(absl::StrCat("there is no ", step.file, kMend));
      continue;
    }
    if (!Defines(*file, step)) {
      add(absl::StrCat(step.file, " has no ", step.function, kMend));
      continue;
    }
    const bool first_of_file = read.insert(step.file).second;
    if (first_of_file) code += CodeOnly(file->text);
    // Its own file has the definition, too. What begins with On is called by a library.
    const bool called = Mentions(code, step.Plain()) > 1 || absl::StartsWith(step.Plain(), "On");
    if (number > 1 && !called) {
      add(absl::StrCat("no file of a step before it calls ", step.Plain(),
                       ": put the function between them that does"));
    }
  }
  return violations;
}

}  // namespace carrel::tidy
