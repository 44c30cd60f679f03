// Runs clang-format; of version 14 alone, for others break lines elsewhere.
#include <array>
#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

std::string OutputOf(const std::string& command) {
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return output;
  std::array<char, 4096> buffer;
  for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    output.append(buffer.data(), n);
  }
  pclose(pipe);
  return output;
}

}  // namespace

std::string ClangFormat() {
  for (const char* name : {"clang-format-14", "clang-format"}) {
    if (absl::StrContains(OutputOf(absl::StrCat(name, " --version 2>/dev/null")), "version 14."))
      return name;
  }
  return "";
}

Violations CheckFormat(const Tree& tree, const std::string& clang_format) {
  std::string list;
  for (const TextFile& file : tree.files) {
    if (file.IsSource()) absl::StrAppend(&list, "'", file.path, "'\n");
  }
  const std::string command =
      absl::StrCat("cd '", tree.root, "' && xargs -P 4 -n 50 ", clang_format,
                   " --dry-run -Werror 2>&1 <<'CARREL_END'\n", list, "CARREL_END\n");
  Violations violations;
  std::string last;
  for (absl::string_view line : absl::StrSplit(OutputOf(command), '\n')) {
    // path:line:column: error: code should be clang-formatted [-Wclang-format-violations]
    if (!absl::StrContains(line, "clang-format-violations")) continue;
    const std::string path(line.substr(0, line.find(':')));
    if (path == last) continue;
    last = path;
    violations.push_back(absl::StrCat(line.substr(0, line.find(": error")), ": not as ",
                                      clang_format, " -i leaves it"));
  }
  return violations;
}

}  // namespace carrel::tidy
