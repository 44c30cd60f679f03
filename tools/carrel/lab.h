// What:   the lab: flags that a method of the papers or a measurement needs, and few others do. They are
//         given as --lab NAME=VALUE (--lab NAME where there is no value), are left out of --help, and
//         `carrel COMMAND --lab help` lists them. What is in the lab may change with any version
//         (docs/stability.md).
//         For one version they are also taken as --NAME VALUE, with a warning.
// Errors: InvalidArgument a name that the command's lab does not have (names it and those it has).
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace CLI {
class App;
}

namespace carrel::tools {

// Options that were declared on the command.
void MoveToLab(CLI::App& command, std::initializer_list<const char*> names);

// The arguments as CLI11 takes them: each --lab NAME=VALUE is --NAME=VALUE. `warn` is told of flags of
// the lab that are given directly.
struct LabArguments {
  std::vector<std::string> arguments;
  std::string help;  // if it was asked for: instead of running
  std::vector<std::string> warnings;
};
absl::StatusOr<LabArguments> ResolveLab(const CLI::App& program,
                                        const std::vector<std::string>& arguments);

// Parses; with warnings, or a page of the lab, printed. Throws as CLI::App::parse; the exit code, if all
// is done with that.
std::optional<int> ParseWithLab(CLI::App& program, const std::vector<std::string>& arguments);

}  // namespace carrel::tools
