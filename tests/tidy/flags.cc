// No document names a flag that nothing has.
#include <map>
#include <regex>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

using Flags = std::set<std::string>;

const std::regex& FlagPattern() {
  static const std::regex pattern("(^|[^A-Za-z0-9_-])(--[a-z][a-z0-9_-]*)");
  return pattern;
}

void AddFlags(const std::string& text, Flags& flags) {
  for (std::sregex_iterator it(text.begin(), text.end(), FlagPattern()), end; it != end; ++it) {
    flags.insert((*it)[2].str());
  }
}

// By command, as docs/cli.md has them: "## carrel ask", then what its --help prints, and maybe the page
// of its lab, whose names are flags too.
std::map<std::string, Flags> FlagsOfCommands(const TextFile& page) {
  static const std::regex heading("^## carrel ?([a-z]*( [a-z]+)?)$");
  static const std::regex option("^  ((-[a-zA-Z],)?--[^ ]+).*");
  static const std::regex of_lab("^  ([a-z][a-z0-9-]*)(=.*)?$");
  std::map<std::string, Flags> commands;
  std::string command;
  bool lab = false;
  for (const std::string& line : page.lines) {
    std::smatch match;
    if (absl::StartsWith(line, "```")) lab = false;
    if (absl::StartsWith(line, "The lab of")) lab = true;
    if (std::regex_match(line, match, heading)) commands[command = match[1].str()];
    if (std::regex_match(line, match, option)) AddFlags(match[1].str(), commands[command]);
    if (lab && std::regex_match(line, match, of_lab))
      commands[command].insert("--" + match[1].str());
  }
  return commands;
}

// Flags of our scripts and benches: whatever they name.
Flags FlagsOfScripts(const Tree& tree) {
  Flags flags;
  for (const TextFile& file : tree.files) {
    const bool bench = file.Is(".cc") && (absl::StartsWith(file.path, "bench/") ||
                                          absl::StrContains(file.path, "bench") ||
                                          absl::StartsWith(file.path, "tests/fuzz/"));
    const bool script = file.Is(".py") || absl::StartsWith(file.text, "#!");
    if (!bench && !script) continue;
    for (const std::string& line : file.lines) {
      if (absl::StrContains(line, "--")) AddFlags(line, flags);
    }
  }
  return flags;
}

// Walks over a document's lines and remembers which command a flag is given to.
class Reader {
 public:
  Reader(const std::map<std::string, Flags>& commands, const Flags& others, Flags& used)
      : commands_(commands), others_(others), used_(used) {
    for (const auto& [command, flags] : commands) all_.insert(flags.begin(), flags.end());
  }

  void Read(const TextFile& file, Violations& violations) {
    bool block = false;
    std::string command;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const std::string& line = file.lines[i];
      if (absl::StartsWith(line, "```")) block = !block;
      const bool goes_on = block && i > 0 && absl::EndsWith(file.lines[i - 1], "\\");
      if (!goes_on) command.clear();
      if (!absl::StrContains(line, "--") && !absl::EndsWith(line, "\\")) continue;
      bool code = block;
      size_t begin = 0;
      while (begin <= line.size()) {  // pieces of code and prose, by turns
        size_t end = block ? line.size() : line.find('`', begin);
        if (end == std::string::npos) end = line.size();
        if (!block && code) command.clear();
        Piece(line.substr(begin, end - begin), code, file, i + 1, command, violations);
        if (!block) command.clear();
        code = block || !code;
        begin = end + 1;
      }
    }
  }

 private:
  void Piece(const std::string& text, bool code, const TextFile& file, size_t line,
             std::string& command, Violations& violations) {
    static const std::regex token(
        "(^|[^A-Za-z0-9_-])(--[a-z][a-z0-9_-]*)|\\bcarrel\"? ([a-z]+)\\b|^([a-z]+)\\b|([|;&])");
    for (std::sregex_iterator it(text.begin(), text.end(), token), end; it != end; ++it) {
      const std::smatch& match = *it;
      for (const int group : {3, 4}) {
        if (code && match[group].matched && commands_.contains(match[group].str()))
          command = match[group].str();
      }
      if (match[5].matched) command.clear();
      if (match[2].matched) Check(match[2].str(), file, line, command, violations);
    }
  }

  void Check(const std::string& flag, const TextFile& file, size_t line, const std::string& command,
             Violations& violations) {
    used_.insert(flag);
    if (!command.empty()) {
      if (commands_.at(command).contains(flag) || flag == "--help") return;
      for (const auto& [name, flags] : commands_) {  // "keys new"
        if (absl::StartsWith(name, command + " ") && flags.contains(flag)) return;
      }
      violations.push_back(At(file, line, absl::StrCat("carrel ", command, " has no ", flag)));
      return;
    }
    if (all_.contains(flag) || others_.contains(flag)) return;
    violations.push_back(At(file, line, absl::StrCat("nothing has a flag ", flag)));
  }

  const std::map<std::string, Flags>& commands_;
  const Flags& others_;
  Flags& used_;
  Flags all_;
};

}  // namespace

Violations CheckFlags(const Tree& tree) {
  Violations violations;
  const TextFile* page = tree.Find(kCliPage);
  if (page == nullptr) return {absl::StrCat("there is no ", kCliPage)};
  const std::map<std::string, Flags> commands = FlagsOfCommands(*page);
  Flags others = FlagsOfScripts(tree), used;
  const std::map<std::string, std::string> foreign =
      ReadExceptions(tree, kForeignFlags, violations);
  for (const auto& [flag, reason] : foreign) others.insert(flag);
  Reader reader(commands, others, used);
  for (const TextFile& file : tree.files) {
    const bool history = file.path == "CHANGELOG.md" || file.path == kCliPage;
    if (file.Is(".md") && !history) reader.Read(file, violations);
  }
  for (const auto& [flag, reason] : foreign) {
    if (!used.contains(flag))
      violations.push_back(
          absl::StrCat(kForeignFlags, ": no document names ", flag, ": take it out"));
  }
  return violations;
}

Violations CheckRunCommands(const Tree& tree) {
  static const std::regex label("^  ([a-z]+)( \\| [a-z-]+)*\\)");
  static const std::regex call("\\./run ([a-z-]+)");
  const TextFile* const run = tree.Find("run");
  if (run == nullptr) return {"there is no run"};
  Flags known;
  std::smatch match;
  for (const std::string& line : run->lines) {
    if (std::regex_search(line, match, label)) known.insert(match[1].str());
  }
  Violations violations;
  for (const TextFile& file : tree.files) {
    const bool reads = file.Is(".md") || absl::StartsWith(file.path, ".ci/");
    if (!reads || file.path == "CHANGELOG.md") continue;
    for (size_t i = 0; i < file.lines.size(); ++i) {
      const std::string& line = file.lines[i];
      for (std::sregex_iterator it(line.begin(), line.end(), call), end; it != end; ++it) {
        if (known.contains((*it)[1].str())) continue;
        violations.push_back(At(file, i + 1, absl::StrCat("./run has no ", (*it)[1].str())));
      }
    }
  }
  return violations;
}

}  // namespace carrel::tidy
