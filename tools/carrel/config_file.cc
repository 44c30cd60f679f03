#include "tools/carrel/config_file.h"

#include <CLI/CLI.hpp>
#include <regex>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "common/shown.h"
#include "tools/carrel/known_names.h"

namespace carrel::tools {
namespace {

std::string Variable(const CLI::App& command, absl::string_view option) {
  return absl::AsciiStrToUpper(
      absl::StrReplaceAll(absl::StrCat("carrel-", command.get_name(), "-", option), {{"-", "_"}}));
}

// What every pod gets of a Service: NAME_SERVICE_HOST, NAME_SERVICE_PORT, one more for each named port, and
// links as Docker's, whose values are addresses. name: behind CARREL_COMMAND_, or all of it.
bool IsOfKubernetes(const std::string& name, const std::string& value) {
  static const std::regex service("(.*_)?SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)");
  static const std::regex link("(.*_)?PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?");
  static const std::regex address("(tcp|udp|sctp)://.*");
  if (std::regex_match(name, service)) return true;
  if (!std::regex_match(name, link)) return false;
  return !absl::EndsWith(name, "PORT") || name.find("_TCP_") != std::string::npos ||
         name.find("_UDP_") != std::string::npos || name.find("_SCTP_") != std::string::npos ||
         std::regex_match(value, address);
}

}  // namespace

void AddConfigFile(CLI::App& program) {
  program.set_config("--config", "",
                     "file of flags: a section per command, [serve], with name = value lines");
  program.allow_config_extras(CLI::config_extras_mode::error);
}

void UseConfigFile(CLI::App& command) {
  command.fallthrough();  // --config belongs to the program
  command.allow_config_extras(CLI::config_extras_mode::error);
  for (CLI::Option* option : command.get_options()) {
    if (!option->get_envname().empty() || option->get_lnames().empty()) continue;
    const std::string& name = option->get_lnames().front();
    if (name == "help" || name == "lab") continue;
    option->envname(Variable(command, name));
    if (option->get_expected_max() > 1) option->delimiter(',');
  }
  // With it CLI11 reads a command's variables where its arguments end, and so before the file; what
  // already has a value, the file does not change.
  command.parse_complete_callback([] {});
}

absl::Status CheckEnvironment(const CLI::App& command, const char* const* environment) {
  const std::string prefix = Variable(command, "");
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options()) {
    if (absl::StartsWith(option->get_envname(), prefix)) known.push_back(option->get_envname());
  }
  for (; *environment != nullptr; ++environment) {
    const absl::string_view entry = *environment;
    const std::string name(entry.substr(0, entry.find('=')));
    if (!absl::StartsWith(name, prefix)) continue;
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string value(entry.size() > name.size() ? entry.substr(name.size() + 1) : "");
    if (IsOfKubernetes(name.substr(prefix.size()), value)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the environment has ", Shown(name), ": carrel ", command.get_name(),
        known.empty() ? " takes nothing from the environment; give the flag itself"
                      : absl::StrCat(" has no such setting", DidYouMean(name, known))));
  }
  return absl::OkStatus();
}

std::string ExplainConfigError(const CLI::App& program, const CLI::ConfigError& error) {
  absl::string_view name = error.what();
  if (!absl::ConsumePrefix(&name, "INI was not able to parse ")) return error.what();
  const std::string file = program.get_option("--config")->as<std::string>();
  const size_t dot = name.find('.');
  const std::string section(dot == absl::string_view::npos ? "" : name.substr(0, dot));
  const std::string setting(dot == absl::string_view::npos ? name : name.substr(dot + 1));
  std::vector<std::string> commands, settings;
  const CLI::App* of = section.empty() ? &program : nullptr;
  for (const CLI::App* command : program.get_subcommands([](const CLI::App*) { return true; })) {
    commands.push_back(command->get_name());
    if (command->get_name() == section) of = command;
  }
  if (of == nullptr) {
    return absl::StrCat(file, ": there is no command ", Shown(section), " that [", Shown(section),
                        "] could be for", DidYouMean(section, commands));
  }
  for (const CLI::Option* option : of->get_options()) {
    for (const std::string& long_name : option->get_lnames()) settings.push_back(long_name);
  }
  const std::string where =
      section.empty() ? "before any section" : absl::StrCat("in [", section, "]");
  return absl::StrCat(file, ": no such setting ", where, ": ", Shown(setting),
                      DidYouMean(setting, settings),
                      section.empty() ? " (settings stand under their command: [serve])" : "");
}

}  // namespace carrel::tools
