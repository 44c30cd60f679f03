#include "tools/carrel/flag_rules.h"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/test_util.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/config_file.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {
namespace {

struct Program {
  CLI::App app;
  Run chosen;
  Program() {
    app.option_defaults()->always_capture_default();
    AddConfigFile(app);
    for (const auto& add :
         {AddPrefill, AddReindex, AddSynth, AddServe, AddStats, AddAsk, AddChat, AddApi, AddEval,
          AddAudit, AddVerify, AddUpgrade, AddExport, AddImport, AddContexts}) {
      add(app, chosen);
    }
  }
  const CLI::App& Parse(const std::vector<std::string>& args) {
    app.parse(std::vector<std::string>(args.rbegin(), args.rend()));
    return *app.get_subcommands().at(0);
  }
};

std::vector<std::string> CommandNames() {
  Program program;
  std::vector<std::string> names;
  for (const CLI::App* command :
       program.app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

const CLI::App& Named(Program& program, const std::string& name) {
  return *program.app.get_subcommand(name);
}

// --flag with a value that its option takes; empty: nothing.
void Give(const CLI::App& command, const std::string& flag, const std::string& value,
          std::vector<std::string>& args) {
  const CLI::Option& option = *command.get_option("--" + flag);
  args.push_back("--" + flag);
  if (option.get_items_expected_max() == 0) return;
  const std::string usual = option.get_default_str();
  args.push_back(!value.empty() ? value : usual.empty() || usual == "[]" ? "1" : usual);
}

std::vector<std::string> Required(const CLI::App& command) {
  std::vector<std::string> args = {command.get_name()};
  for (const CLI::Option* option : command.get_options()) {
    if (!option->get_required()) continue;
    if (!option->get_lnames().empty()) args.push_back("--" + option->get_lnames().front());
    args.push_back("1");
  }
  return args;
}

bool HasAny(const std::vector<std::string>& args, const std::vector<std::string>& flags) {
  for (const std::string& flag : flags) {
    for (const std::string& arg : args) {
      if (arg == "--" + flag) return true;
    }
  }
  return false;
}

TEST(FlagRulesTest, AFlagThatChangesNothingIsRefused_OfEveryCommand) {
  int rules = 0;
  std::set<std::string> commands;
  for (const std::string& name : CommandNames()) {
    Program of_rules;
    const std::vector<FlagRule> all = RulesOf(Named(of_rules, name));
    for (const FlagRule& rule : all) {
      Program alone, beside;
      const CLI::App& command = Named(alone, name);
      std::vector<std::string> args = Required(command);
      Give(command, rule.flag, "", args);
      if (rule.values.empty() && HasAny(args, rule.needs)) continue;  // which is required anyway
      ASSERT_NO_THROW(alone.Parse(args)) << name << " --" << rule.flag;
      const absl::Status refused = CheckFlags(command);
      EXPECT_THAT(refused, StatusIs(absl::StatusCode::kInvalidArgument,
                                    absl::StrCat("--", rule.flag, " changes nothing without --")))
          << name;
      // Beside all that it needs it is taken.
      for (const FlagRule& other : all) {
        if (other.flag != rule.flag || HasAny(args, {other.needs.front()})) continue;
        Give(command, other.needs.front(), other.values.empty() ? "" : other.values.front(), args);
        for (const FlagRule& next : all) {  // what is needed may itself need something
          if (next.flag != other.needs.front() || HasAny(args, {next.needs.front()})) continue;
          Give(command, next.needs.front(), next.values.empty() ? "" : next.values.front(), args);
        }
      }
      ASSERT_NO_THROW(beside.Parse(args)) << name << " --" << rule.flag;
      CARREL_EXPECT_OK(CheckFlags(Named(beside, name))) << name << " --" << rule.flag;
      ++rules;
      commands.insert(name);
    }
  }
  EXPECT_GE(rules, 60);
  EXPECT_GE(commands.size(), 10u);
}

TEST(FlagRulesTest, WhatEveryCommandReadsOfTheEnvironmentIsNoMistake) {
  setenv("CARREL_KEY_FILE", "/a/key", 1);
  {
    Program program;
    const CLI::App& command = program.Parse({"ls", "--store", "1"});
    CARREL_EXPECT_OK(CheckFlags(command));
  }
  Program program;
  const CLI::App& command = program.Parse({"ls", "--store", "1", "--key-file", "/another/key"});
  EXPECT_FALSE(CheckFlags(command).ok());
  unsetenv("CARREL_KEY_FILE");
}

TEST(ConfigFileTest, VariablesOfTheCommandThatItDoesNotHaveAreRefused) {
  Program program;
  const CLI::App& serve = Named(program, "serve");
  const auto check = [](const CLI::App& command, const char* variable) {
    const char* const environment[] = {"PATH=/bin", variable, nullptr};
    return CheckEnvironment(command, environment);
  };
  for (const char* good :
       {"CARREL_SERVE_MAX_SESSIONS=3", "CARREL_SERVICE_HOST=10.0.0.1",
        "CARREL_PORT=tcp://10.0.0.1:1", "CARREL_SEED=7", "CARREL_API_KEYS=x",
        "CARREL_SERVE_SERVICE_HOST=10.0.0.1", "CARREL_SERVE_SERVICE_PORT=1",
        "CARREL_SERVE_SERVICE_PORT_GRPC=1", "CARREL_SERVE_PORT=tcp://10.0.0.1:1",
        "CARREL_SERVE_PORT_1_TCP=tcp://10.0.0.1:1", "CARREL_SERVE_PORT_1_TCP_PORT=1",
        "CARREL_SERVE_PORT_1_TCP_ADDR=10.0.0.1", "CARREL_SERVE_A_PORT_1_UDP_PROTO=udp",
        "CARREL_SERVE_METRICS_SERVICE_HOST=10.0.0.1"}) {
    CARREL_EXPECT_OK(check(serve, good)) << good;
  }
  for (const char* bad : {"CARREL_SERVE_MAX_SESIONS=3", "CARREL_SERVE_PORT=50051",
                          "CARREL_SERVE_HOST=x", "CARREL_SERVE_METRICS_PORT=9464",
                          "CARREL_SERVE_=1", "CARREL_SERVE_LAB=x", "CARREL_SERVE_max_sessions=3"}) {
    EXPECT_THAT(check(serve, bad), StatusIs(absl::StatusCode::kInvalidArgument, "no such setting"))
        << bad;
  }
  EXPECT_THAT(
      check(serve, "CARREL_SERVE_MAX_SESIONS=3"),
      StatusIs(absl::StatusCode::kInvalidArgument, "did you mean CARREL_SERVE_MAX_SESSIONS?"));
  CARREL_EXPECT_OK(check(Named(program, "api"), "CARREL_API_KEYS=x"));
  EXPECT_FALSE(check(Named(program, "ask"), "CARREL_ASK_STORE=x").ok());
}

TEST(SuggestTest, NamesWhatIsNear) {
  const std::vector<std::string> names = {"prefill", "serve", "ls", "rm"};
  EXPECT_EQ(DidYouMean("prefil", names), "; did you mean prefill?");
  EXPECT_EQ(DidYouMean("esrve", names), "; did you mean serve?");
  EXPECT_EQ(DidYouMean("lss", names), "; did you mean ls?");
  EXPECT_EQ(DidYouMean("delete", names), "");
  EXPECT_EQ(DidYouMean("", names), "");
  EXPECT_EQ(DidYouMean(std::string(100000, 'p'), names), "");
}

TEST(SamplingFlagsTest, FlagsComeBeforeAdviceAndAdviceBeforeGreedy) {
  model::GenerationDefaults advice;
  SamplingFlags flags;
  EXPECT_TRUE(flags.Resolve(advice)->greedy());
  EXPECT_EQ(flags.Tell(advice), "");
  advice.source = "m/generation_config.json";
  advice.do_sample = true;
  advice.temperature = 0.7;
  advice.top_k = 20;
  advice.repetition_penalty = 1.1;
  EXPECT_EQ(flags.Resolve(advice)->temperature, 0.7);
  EXPECT_EQ(flags.Resolve(advice)->top_k, 20);
  const std::string told = flags.Tell(advice);
  for (const char* part : {"m/generation_config.json", "temperature 0.7", "top_k 20",
                           "repetition_penalty 1.1", "--temperature 0"}) {
    EXPECT_THAT(told, testing::HasSubstr(part));
  }
  flags.top_p = 0.5;
  EXPECT_EQ(flags.Resolve(advice)->top_p, 0.5);
  EXPECT_THAT(flags.Resolve({}), StatusIs(absl::StatusCode::kInvalidArgument, "--top-p changes"));
  flags = {.temperature = 0};
  EXPECT_TRUE(flags.Resolve(advice)->greedy());
  EXPECT_EQ(flags.Tell(advice), "");
  flags.seed = 3;
  EXPECT_THAT(flags.Resolve(advice),
              StatusIs(absl::StatusCode::kInvalidArgument, "--seed changes"));
  flags = {.temperature = 1};
  EXPECT_EQ(flags.Resolve({})->temperature, 1);
  flags = {.temperature = 101};
  EXPECT_FALSE(flags.Check().ok());
}

}  // namespace
}  // namespace carrel::tools
