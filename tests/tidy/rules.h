// What:   the rules of this house that a machine can hold. Each takes a tree and says what breaks it.
// Shapes: a list of "path:line: what", empty if all is well.
// Edge:   lists of exceptions (files beside this one, in the tree that is checked) may only shrink:
//         one that is no longer needed is a violation itself.
// Threads: reentrant.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/tidy/tree.h"

namespace carrel::tidy {

using Violations = std::vector<std::string>;

// Exceptions: a file of lines "KEY  REASON", where '#' begins a comment. A line without a reason is a
// violation.
std::map<std::string, std::string> ReadExceptions(const Tree& tree, const std::string& path,
                                                  Violations& violations);

// --- format.cc
// The command of clang-format 14; empty if there is none.
std::string ClangFormat();
Violations CheckFormat(const Tree& tree, const std::string& clang_format);

// --- length.cc
inline constexpr int kMostFunctionLines = 70, kMostFileLines = 700;
inline constexpr char kLongFunctions[] = "tests/tidy/long_functions.txt";  // keys: PATH:NAME
inline constexpr char kLongFiles[] = "tests/tidy/long_files.txt";          // keys: PATH
struct Function {
  std::string name;  // of a test "Suite.Name", of a member "Class::Name" where it stands so
  int first_line = 0, last_line = 0;
};
// Functions with a body, in order; those inside others are part of these.
std::vector<Function> FunctionsOf(absl::string_view text);
Violations CheckFunctionLengths(const Tree& tree);
Violations CheckFileLengths(const Tree& tree);

// --- headers.cc
// A header opens with a comment block that says What; one whose classes keep a pointer, reference,
// string_view or Span (members that end in '_') says Ownership in some comment. Those of include/carrel give an Example of examples/.
Violations CheckHeaders(const Tree& tree);

// --- readmes.cc
// A folder with headers has a README.md that names each of them, or is named by the one above;
// that of tests/ names its tests, too. What a document names as a source file is there.
Violations CheckReadmes(const Tree& tree);
Violations CheckNamedFiles(const Tree& tree);

// --- references.cc
// In documents: relative links lead somewhere, also to their heading. In documents, comments and
// texts: decisions that are named exist, and so do numbered sections and documents.
Violations CheckLinks(const Tree& tree);
Violations CheckDecisions(const Tree& tree);
Violations CheckSections(const Tree& tree);

// --- members.cc
// What a document names as `Class::Member` is a word of a file that defines the class.
Violations CheckNamedMembers(const Tree& tree);

// --- trace.cc
inline constexpr char kTracePage[] = "docs/trace.md";
// The page's steps are numbered in order. Each names a file and a function that this defines (a header may declare it),
// and which the file of that step or of one before it calls (what begins with On, a library).
Violations CheckTrace(const Tree& tree);

// --- flags.cc
inline constexpr char kCliPage[] = "docs/cli.md";
inline constexpr char kForeignFlags[] = "tests/tidy/foreign_flags.txt";  // keys: --flag
// Every --flag in a document is one of the program's (of docs/cli.md; of the command that stands
// before it in the same line of code), of ./run and other scripts, of a bench, or a listed one of
// other programs.
Violations CheckFlags(const Tree& tree);

// Every "./run COMMAND" of documents and of .ci/ is one of the script's.
Violations CheckRunCommands(const Tree& tree);

// --- borders.cc
// Includes between the rooms inside decoder, kvstore/index, kernels and model go allowed ways. Those
// between folders are held by include_rules_test.
Violations CheckInnerBorders(const Tree& tree);

// --- clocks.cc
// http_api and serving count waits and times by SteadyNow(); absl::Now() stands in ToUnixSeconds(..) alone. Tests may.
Violations CheckClocks(const Tree& tree);

// --- json.cc
// Only common/json.cc calls nlohmann's parse, value(..) and dump; tests and benchmarks may.
Violations CheckJson(const Tree& tree);

// --- overruled.cc
// A decision that says "Overruled by N", "Replaced by N", "Superseded by N" or "Amended by N" is named by
// decision N with "Overrules", "Replaces", "Supersedes" or "Amends", and the other way round.
Violations CheckOverruled(const Tree& tree);

// --- prose.cc
inline constexpr int kMostDecisionWords = 400, kMostLineCharacters = 400;
inline constexpr int kMostMeanDecisionWords = 300;
inline constexpr char kLongLines[] =
    "tests/tidy/long_lines.txt";  // keys: PATH; behind it, how many
// Words of a decision, its title and tables among them, and of all in the mean. Characters of a line of Markdown outside tables and
// code fences; a listed file has as many longer lines as the list says, no more and no fewer.
Violations CheckDecisionWords(const Tree& tree);
Violations CheckLineCharacters(const Tree& tree);

// Of UTF-8.
int Characters(absl::string_view line);

// --- versions.cc
inline constexpr int kMostEntryCharacters = 200;
// CMakeLists.txt's version is that of the program, of the library's headers, of the changelog's first heading, and of every
// image that is named "carrel:VERSION".
Violations CheckVersions(const Tree& tree);
// CHANGELOG.md: each entry is one line of a section, Added, Changed, Fixed or Removed.
Violations CheckChangelog(const Tree& tree);

// --- counters.cc
inline constexpr char kCounterBounds[] =
    "tests/tidy/counters.txt";  // keys: a counter; behind it the bound, and the goal
// What is built twice or stands where it does not belong is as often there as the list says, which may only fall.
Violations CheckCounters(const Tree& tree);

}  // namespace carrel::tidy
