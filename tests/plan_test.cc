// How a context is attended to where nobody says it: --plan, inspect --plan, doctor.
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using PlanTest = StoreTest;

constexpr int kFailed = 1;
constexpr int kBad = 2;

TEST_F(PlanTest, EveryWay_GivesTheAnswer_AndSaysWhichItWas) {
  for (const std::string& way :
       {std::string("auto"), std::string("store"), std::string("store-dense"), std::string("host"),
        std::string("host-dense")}) {
    const Outcome asked =
        Carrel(Args{"ask", "--model", DemoModel(), "--store", store_, "--context", kKept, "--raw",
                    "--max-tokens", "8", "--json", "--plan", way, kQuestion});
    ASSERT_THAT(asked, Succeeds());
    const json told = JsonOf(asked);
    EXPECT_EQ(told.at("text"),
              JsonOf(Carrel(Ask(kKept, {"--json", "--max-tokens", "8"}))).at("text"))
        << way;
    const std::string taken = told.at("plan").at("taken");
    EXPECT_TRUE(way == "auto" || taken == way) << taken;
    EXPECT_THAT(taken, testing::AnyOf(HasSubstr("store"), HasSubstr("host")));
    EXPECT_EQ(told.at("plan").at("ways").size(), 6u);
    EXPECT_THAT(told.at("plan").at("ways").at("device").at("unfit").get<std::string>(),
                testing::Not(testing::IsEmpty()));
    const bool exact = told.at("plan").at("ways").at(taken).at("error") == 0;
    EXPECT_TRUE(exact || !taken.ends_with("-dense")) << taken;
  }
}

TEST_F(PlanTest, Verbose_IsOneLine) {
  const Outcome asked =
      Carrel(Args{"ask", "--model", DemoModel(), "--store", store_, "--context", kKept, "--raw",
                  "--max-tokens", "4", "--verbose", "--plan", "store", kQuestion});
  ASSERT_THAT(asked, Succeeds());
  EXPECT_THAT(asked.err, HasSubstr("plan store, "));
  EXPECT_THAT(asked.err, HasSubstr(" prompt tokens in "));
}

TEST_F(PlanTest, WhatCannotBeHad_SaysWhy) {
  const auto ask = [&](const Args& more) {
    return Carrel(
        With({"ask", "--model", DemoModel(), "--store", store_, "--context", kKept, "--raw", "x"},
             more));
  };
  EXPECT_THAT(ask({"--plan", "device"}), FailsWith(kFailed, Texts{"device: ", "CPU"}));
  EXPECT_THAT(ask({"--plan", "devise"}),
              FailsWith(kBad, Texts{"plan=devise", "auto, store, store-dense"}));
  EXPECT_THAT(ask({"--plan", "host", "--zone", "host"}),
              FailsWith(kBad, Texts{"--plan host", "--zone host"}));
  EXPECT_THAT(ask({"--plan", "host", "--lab", "want=rows"}),
              FailsWith(kBad, Texts{"--plan host", "--lab"}));
  EXPECT_THAT(Carrel(Args{"ask", "--model", DemoModel(), "--plan", "host", "x"}),
              FailsWith(kBad, Texts{"--plan"}));
  EXPECT_THAT(ask({"--plan", "store-dense", "--top-k", "4"}),
              FailsWith(kBad, Texts{"plan=store-dense", "a number of rows was asked for"}));
}

TEST_F(PlanTest, Inspect_ShowsEachWay) {
  const Outcome shown =
      Carrel(Args{"inspect", kKept, "--store", store_, "--plan", "--model", DemoModel()});
  ASSERT_THAT(shown, Succeeds());
  EXPECT_THAT(shown.out, HasSubstr("plan store"));
  EXPECT_THAT(shown.out, HasSubstr("not device: the model runs on the CPU"));
  EXPECT_THAT(Carrel(Args{"inspect", kKept, "--store", store_, "--plan"}),
              FailsWith(kBad, Texts{"--model"}));
  EXPECT_THAT(Carrel(Args{"inspect", kKept, "--store", store_, "--model", DemoModel()}),
              FailsWith(kBad, Texts{"--model changes nothing without --plan"}));
}

TEST_F(PlanTest, Doctor_LooksMeasuresAndKeepsTheRates) {
  const std::string cache = path("cache");
  const Outcome looked = Carrel(Command{
      .args = {"doctor", "--store", store_, "--context", kKept, "--model", DemoModel(), "--json"},
      .environment = {{"CARREL_CACHE", cache}}});
  ASSERT_THAT(looked, Succeeds());
  const json told = JsonOf(looked);
  for (const char* what :
       {"processor", "memory", "huge pages", "descriptors", "disk", "clock", "GPU"}) {
    EXPECT_THAT(told.at("findings").dump(), HasSubstr(what));
  }
  EXPECT_TRUE(told.at("rates").at("ways").at("host").at("measured"));
  EXPECT_THAT(told.at("rates_file").get<std::string>(), HasSubstr(cache));
  // The next question plans by what was measured.
  const auto planned = [&] {
    return JsonOf(Carrel(Command{
        .args = {"inspect", kKept, "--store", store_, "--plan", "--json", "--model", DemoModel()},
        .environment = {{"CARREL_CACHE", cache}}}));
  };
  EXPECT_EQ(planned().at("machine"), told.at("plan").at("machine"));
  // A file that is damaged is as none: it is measured and written anew.
  WriteFile("cache/" + told.at("rates_file").get<std::string>().substr(cache.size() + 1),
            "{\"version\": 1");
  EXPECT_EQ(planned().at("machine"), told.at("plan").at("machine"));
  EXPECT_THAT(ReadBytes(told.at("rates_file").get<std::string>()), HasSubstr("store-dense"));
  EXPECT_THAT(Carrel(Args{"doctor"}).out, HasSubstr("processor"));
  EXPECT_THAT(Carrel(Args{"doctor", "--context", kKept, "--store", store_}),
              FailsWith(kBad, Texts{"--model"}));
}

}  // namespace
}  // namespace carrel::cli
