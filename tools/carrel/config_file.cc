#include "tools/carrel/config_file.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"

namespace carrel::tools {

void AddConfigFile(CLI::App& program) {
  program.set_config("--config", "",
                     "file of flags: a section per command, [serve], with name = value lines");
  program.allow_config_extras(CLI::config_extras_mode::error);
}

void UseConfigFile(CLI::App& command) {
  command.fallthrough();  // --config belongs to the program
  command.allow_config_extras(CLI::config_extras_mode::error);
  for (CLI::Option* option : command.get_options()) {
    if (!option->get_envname().empty() || option->get_lnames().empty() ||
        option->get_lnames().front() == "help")
      continue;
    const std::string name =
        absl::StrCat("CARREL_", command.get_name(), "_",
                     absl::StrReplaceAll(option->get_lnames().front(), {{"-", "_"}}));
    option->envname(absl::AsciiStrToUpper(name));
    if (option->get_expected_max() > 1) option->delimiter(',');
  }
  // With it CLI11 reads a command's variables where its arguments end, and so before the file; what
  // already has a value, the file does not change.
  command.parse_complete_callback([] {});
}

}  // namespace carrel::tools
