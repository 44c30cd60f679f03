// What:   which flags are of use only beside another one, for all commands in one table. A flag that would
//         change nothing is refused: who gives it means something by it. Variables of the environment that
//         every command reads ($CARREL_KEY_FILE) are no such flags.
// Errors: InvalidArgument, naming the flag and what it needs.
// Threads: any.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace carrel::tools {

// Of a command that was parsed.
absl::Status CheckFlags(const CLI::App& command);

// Whether it was given to this command, be it by a variable of the command's own.
bool Given(const CLI::Option& option);

// The table's rows that are about this command, a row for each flag, for a test: `flag` is of use only with one
// of `needs`, which then has one of `values`, if there are any.
struct FlagRule {
  std::string flag;
  std::vector<std::string> needs, values;
};
std::vector<FlagRule> RulesOf(const CLI::App& command);

}  // namespace carrel::tools
