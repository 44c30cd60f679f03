// carrel: prefill documents, serve them, ask them. Exit codes: 0 done, 1 failed (the reason is on
// standard error), 2 wrong usage or bad input.
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "common/lab.h"
#include "common/no_memory.h"
#include "common/shown.h"
#include "common/status.h"
#include "common/thrown.h"
#include "common/version.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/config_file.h"
#include "tools/carrel/flag_rules.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/lab.h"

namespace carrel::tools {
namespace {

// --help with one line per flag: its default, not its variable in the environment, nor what it excludes (an error says
// that).
class HelpFormat final : public CLI::Formatter {
 public:
  // Without empty lines at its end.
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    return absl::StrCat(
        absl::StripTrailingAsciiWhitespace(CLI::Formatter::make_help(app, std::move(name), mode)),
        "\n");
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    std::string text;
    if (option->get_type_size() != 0) {
      const std::string type = option->get_type_name();
      absl::StrAppend(&text, " ", type.substr(0, type.find(':')));
      const std::string usual = option->get_default_str();
      if (!usual.empty() && usual != "[]" && !option->get_required())
        absl::StrAppend(&text, "=", usual);
      if (option->get_expected_max() == CLI::detail::expected_max_vector_size)
        absl::StrAppend(&text, " ...");
    }
    if (option->get_required()) absl::StrAppend(&text, " ", get_label("REQUIRED"));
    return text;
  }
};

// An argument that nobody expected, with what may have been meant: a command, or a flag of the command.
std::string ExplainExtras(const CLI::App& failed, const std::string& what) {
  // Behind the last colon they stand one after the other; a flag tells more than what follows it.
  const std::vector<std::string> arguments =
      absl::StrSplit(absl::string_view(what).substr(what.rfind(": ") + 2), ' ', absl::SkipEmpty());
  std::string first = arguments.empty() ? "" : arguments.front();
  for (const std::string& argument : arguments) {
    if (absl::StartsWith(argument, "--") && !absl::StartsWith(first, "--")) first = argument;
  }
  first = first.substr(0, first.find('='));
  std::vector<std::string> names;
  const bool flag = absl::StartsWith(first, "--");
  if (flag) {
    for (const CLI::Option* option : failed.get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  } else {
    for (const CLI::App* command : failed.get_subcommands([](const CLI::App*) { return true; })) {
      names.push_back(command->get_name());
    }
    if (!names.empty()) {
      return absl::StrCat("there is no command ", Shown(first), DidYouMean(first, names));
    }
  }
  return absl::StrCat(what, DidYouMean(first, names));
}

std::string Explain(const CLI::App* failed, const CLI::Error& error) {
  // What a command hands on to the program, for --config, is the command's mistake.
  if (const auto parsed = failed->get_subcommands(); !parsed.empty()) failed = parsed.front();
  std::string what = error.what();
  if (const auto* config = dynamic_cast<const CLI::ConfigError*>(&error); config != nullptr) {
    const CLI::App* program = failed;
    while (program->get_parent() != nullptr) program = program->get_parent();
    what = ExplainConfigError(*program, *config);
  } else if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
    what = ExplainExtras(*failed, what);
  }
  return absl::StrCat("carrel: ", what, "\nSee carrel ",
                      failed->get_name() == "carrel" ? "" : absl::StrCat(failed->get_name(), " "),
                      "--help\n");
}

int Main(int argc, char** argv) {
  // A reader that went away (carrel ls | head) is an error of write, not a reason to die silently
  // in the middle.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on file size is a full disk
  // Debian builds Abseil without NDEBUG: every lock of a mutex, gRPC's too, would be looked up under a
  // lock of the whole process, in a graph of lock orders that only grows. Tests keep it.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  // Standard output is the commands'; what a person must know beside it goes to standard error.
  spdlog::set_default_logger(spdlog::stderr_logger_mt("carrel"));
  spdlog::set_level(spdlog::level::warn);
  CLI::App app(
      "Carrel keeps the KV cache of a long document as a searchable database: prefill once, ask "
      "from anywhere.",
      "carrel");
  app.set_version_flag(
      "--version",
      absl::StrCat("carrel ", kVersion, HasLab() ? "\nwith the lab" : "\nwithout the lab"));
  app.require_subcommand(1);
  app.option_defaults()->always_capture_default();  // commands inherit these
  app.formatter(std::make_shared<HelpFormat>());
  AddConfigFile(app);
  app.failure_message(&Explain);
  Run chosen;
  for (const auto add :
       {AddPrefill, AddReindex, AddSynth,  AddServe,  AddKeys,   AddStats,   AddAsk,     AddChat,
        AddApi,     AddDoctor,  AddEval,   AddNeedle, AddAudit,  AddVerify,  AddUpgrade, AddExport,
        AddImport,  AddWarm,    AddBucket, AddJob,    AddWorker, AddContexts}) {
    add(app, chosen);
  }
  try {
    const auto known = app.get_subcommands(
        [&](const CLI::App* command) { return argc > 1 && command->get_name() == argv[1]; });
    if (argc > 1 && argv[1][0] != '-' && known.empty()) throw CLI::ExtrasError({argv[1]});
    const std::optional<int> done = ParseWithLab(app, {argv + std::min(argc, 1), argv + argc});
    if (done.has_value()) return *done;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  ExitWhenMemoryEnds();
  const CLI::App& command = *app.get_subcommands().at(0);
  absl::Status status = CheckEnvironment(command, environ);
  if (status.ok()) status = CheckFlags(command);
  if (status.ok()) status = CatchThrown(command.get_name(), chosen);
  errno = 0;
  if (status.ok() && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
    if (errno == EPIPE) return 1;  // the reader has what it wanted
    status = ErrnoStatus(errno, "write standard output");
  }
  if (status.ok()) return 0;
  absl::FPrintF(stderr, "carrel: %s: %s\n", absl::StatusCodeToString(status.code()),
                status.message());
  return status.code() == absl::StatusCode::kInvalidArgument ? 2 : 1;
}

}  // namespace
}  // namespace carrel::tools

int main(int argc, char** argv) { return carrel::tools::Main(argc, argv); }
