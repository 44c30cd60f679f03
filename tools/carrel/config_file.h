// What:   flags from a file and from the environment, beside those of the command line: a flag that is
//         given there counts, else the environment variable CARREL_SERVE_NAME (--max-top-k:
//         CARREL_SERVE_MAX_TOP_K; options that have a variable of their own keep it), else what the file says under [serve].
// Source: TOML as CLI11 reads it: sections, name = value, lists; # begins a comment.
// Errors: wrong usage, as of a flag: a name that the command does not have, a value that it refuses, a
//         file that cannot be read.
#pragma once

namespace CLI {
class App;
}

namespace carrel::tools {

// --config FILE, of the whole program: a section per command.
void AddConfigFile(CLI::App& program);
// Of a command whose options are all declared: --config may follow its name, and its options have
// their environment variables. Required options must be checked when the command runs.
void UseConfigFile(CLI::App& command);

}  // namespace carrel::tools
