#include "tools/carrel/lab.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/lab.h"
#include "common/status.h"

namespace carrel::tools {
namespace {

constexpr char kLab[] = "--lab";

bool InLab(const CLI::Option& option) {
  return option.get_group().empty() && !option.get_lnames().empty();
}

std::vector<const CLI::Option*> LabOf(const CLI::App& command) {
  std::vector<const CLI::Option*> options;
  for (const CLI::Option* option : command.get_options()) {
    if (InLab(*option)) options.push_back(option);
  }
  return options;
}

const CLI::Option* Find(const CLI::App& command, absl::string_view name) {
  for (const CLI::Option* option : LabOf(command)) {
    const std::vector<std::string>& names = option->get_lnames();
    if (std::find(names.begin(), names.end(), name) != names.end()) return option;
  }
  return nullptr;
}

std::string Page(const CLI::App& command) {
  std::string page =
      absl::StrCat("The lab of carrel ", command.get_name(),
                   ": --lab NAME=VALUE, may be repeated; may change with any version\n");
  if (!HasLab()) {
    absl::StrAppend(
        &page, "This carrel was built without CARREL_LAB: what lab/README.md lists is refused\n");
  }
  for (const CLI::Option* option : LabOf(command)) {
    absl::StrAppend(&page, "  ", option->get_lnames().front());
    if (option->get_items_expected_max() > 0) {
      absl::StrAppend(&page, "=",
                      option->get_default_str().empty() ? "VALUE" : option->get_default_str());
    }
    absl::StrAppend(&page, "\n      ", option->get_description(), "\n");
  }
  return page;
}

// NAME=VALUE, or NAME.
absl::StatusOr<std::string> Resolved(const CLI::App& command, const std::string& given) {
  const std::string name = given.substr(0, given.find('='));
  if (Find(command, name) != nullptr) return absl::StrCat("--", given);
  std::vector<std::string> names;
  for (const CLI::Option* option : LabOf(command)) names.push_back(option->get_lnames().front());
  return absl::InvalidArgumentError(
      absl::StrCat("--lab ", name, ": the lab of carrel ", command.get_name(), " has ",
                   names.empty() ? "nothing" : absl::StrJoin(names, ", "), "; see --lab help"));
}

}  // namespace

void MoveToLab(CLI::App& command, std::initializer_list<const char*> names) {
  for (const char* name : names) command.get_option(absl::StrCat("--", name))->group("");
  if (command.get_option_no_throw(kLab) == nullptr) {
    command
        .add_option_function<std::string>(
            kLab, [](const std::string&) {}, "methods and measurements; --lab help lists them")
        ->type_name("NAME=VALUE");
  }
}

absl::StatusOr<LabArguments> ResolveLab(const CLI::App& program,
                                        const std::vector<std::string>& arguments) {
  LabArguments resolved;
  const CLI::App* command = nullptr;
  for (const CLI::App* known : program.get_subcommands([](const CLI::App*) { return true; })) {
    if (!arguments.empty() && known->get_name() == arguments.front()) command = known;
  }
  if (command == nullptr || LabOf(*command).empty()) {
    resolved.arguments = arguments;
    return resolved;
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      resolved.arguments.insert(resolved.arguments.end(), arguments.begin() + static_cast<long>(i),
                                arguments.end());
      break;
    }
    std::string of_lab;
    if (argument == kLab && i + 1 < arguments.size()) {
      of_lab = arguments[++i];
    } else if (absl::StartsWith(argument, "--lab=")) {
      of_lab = argument.substr(6);
    } else {
      const std::string name = argument.substr(0, argument.find('='));
      if (absl::StartsWith(name, "--") && Find(*command, name.substr(2)) != nullptr) {
        resolved.warnings.push_back(
            absl::StrCat(name, " is of the lab: the next version takes it as --lab ",
                         Find(*command, name.substr(2))->get_lnames().front(), "=.. alone"));
      }
      resolved.arguments.push_back(argument);
      continue;
    }
    if (of_lab == "help") {
      resolved.help = Page(*command);
      return resolved;
    }
    ASSIGN_OR_RETURN(std::string flag, Resolved(*command, of_lab));
    resolved.arguments.push_back(std::move(flag));
  }
  return resolved;
}

std::optional<int> ParseWithLab(CLI::App& program, const std::vector<std::string>& arguments) {
  const absl::StatusOr<LabArguments> resolved = ResolveLab(program, arguments);
  if (!resolved.ok()) {
    absl::FPrintF(stderr, "carrel: %s\n", resolved.status().message());
    return 2;
  }
  if (!resolved->help.empty()) {
    std::fputs(resolved->help.c_str(), stdout);
    return std::fflush(stdout) == 0 ? 0 : 1;
  }
  for (const std::string& warning : resolved->warnings) {
    absl::FPrintF(stderr, "carrel: %s\n", warning);
  }
  // CLI11 takes them from the end.
  program.parse(std::vector<std::string>(resolved->arguments.rbegin(), resolved->arguments.rend()));
  return std::nullopt;
}

}  // namespace carrel::tools
