// What:   flags from a file and from the environment, beside those of the command line: a flag that is
//         given there counts, else the environment variable CARREL_COMMAND_NAME (serve's --max-top-k:
//         CARREL_SERVE_MAX_TOP_K; options that have a variable of their own keep it), else what the file says
//         under [COMMAND].
// Source: TOML as CLI11 reads it: sections, name = value, lists; # begins a comment. Kubernetes' variables of
//         services: "Discovering services", environment variables.
// Errors: wrong usage, as of a flag: a name that the command does not have, be it in the file or in a variable
//         that begins like the command's own; a value that it refuses; a file that cannot be read.
//         What Kubernetes sets in every pod for a Service named carrel-COMMAND is no mistake.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace CLI {
class App;
class ConfigError;
}  // namespace CLI

namespace carrel::tools {

// --config FILE, of the whole program: a section per command.
void AddConfigFile(CLI::App& program);
// Of a command whose options are all declared: --config may follow its name, and its options have
// their environment variables. Required options must be checked when the command runs.
void UseConfigFile(CLI::App& command);

// InvalidArgument: a variable CARREL_COMMAND_* of `environment` (as environ) that is none of the command's.
absl::Status CheckEnvironment(const CLI::App& command, const char* const* environment);

// What CLI11 says of a setting that it does not know, for people.
std::string ExplainConfigError(const CLI::App& program, const CLI::ConfigError& error);

}  // namespace carrel::tools
