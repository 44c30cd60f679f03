#include "serving/step_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <random>

#include "common/test_random.h"

namespace carrel::serving {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const int kTurns[4] = {};
const void* const kAlice = &kTurns[0];
const void* const kMallory = &kTurns[1];

StepPlan::Waiting Token(const void* turn) { return {turn, 1, false}; }
StepPlan::Waiting Block(const void* turn, int64_t tokens) { return {turn, tokens, true}; }

// Tokens that each turn went on by in `steps` steps of answers that never end.
std::map<const void*, int64_t> Serve(StepPlan& plan, std::deque<StepPlan::Waiting> answers,
                                     int steps, double fixed_seconds = 0) {
  std::map<const void*, int64_t> served;
  for (int s = 0; s < steps; ++s) {
    const std::vector<StepPlan::Waiting> waiting(answers.begin(), answers.end());
    const std::vector<size_t> chosen = plan.Next(waiting);
    EXPECT_FALSE(chosen.empty());
    int64_t tokens = 0;
    for (auto it = chosen.rbegin(); it != chosen.rend(); ++it) answers.erase(answers.begin() + *it);
    for (size_t i : chosen) {
      answers.push_back(waiting[i]);
      served[waiting[i].turn] += waiting[i].tokens;
      tokens += waiting[i].tokens;
    }
    plan.Took(tokens, absl::Seconds(fixed_seconds + 0.001 * static_cast<double>(tokens)));
  }
  return served;
}

TEST(StepPlanTest, NobodyWaits_NobodyGoesOn) { EXPECT_THAT(StepPlan(32).Next({}), IsEmpty()); }

TEST(StepPlanTest, ATurnAlone_AllItsTokensAndPromptsUpToTheirBound) {
  StepPlan plan(32);
  EXPECT_THAT(plan.Next({Token(kAlice), Block(kAlice, 20), Block(kAlice, 20), Token(kAlice),
                         Block(kAlice, 12)}),
              ElementsAre(0, 1, 3, 4));
  EXPECT_THAT(StepPlan(0).Next({Block(kAlice, 20), Block(kAlice, 20), Token(kAlice)}),
              ElementsAre(0, 2));
}

TEST(StepPlanTest, OneAnswerBesideSixteen_GoesOnInEachStepAndTakesHalfOfIt) {
  StepPlan plan(32);
  std::deque<StepPlan::Waiting> answers(16, Token(kMallory));
  answers.push_back(Token(kAlice));
  const auto served = Serve(plan, answers, 160);
  EXPECT_EQ(served.at(kAlice), 160);
  EXPECT_NEAR(served.at(kMallory), 160, 24) << "a fixed part is learnt as nothing";
}

TEST(StepPlanTest, WhereTheFixedPartIsMost_NobodyIsHeldBack) {
  StepPlan plan(32);
  for (int tokens : {1, 5, 17, 2, 9}) plan.Took(tokens, absl::Seconds(0.1 + 0.001 * tokens));
  EXPECT_NEAR(plan.fixed_tokens(), 64, 1e-6);
  std::deque<StepPlan::Waiting> answers(16, Token(kMallory));
  answers.push_back(Token(kAlice));
  const auto served = Serve(plan, answers, 100, 0.1);
  EXPECT_EQ(served.at(kAlice), 100);
  EXPECT_EQ(served.at(kMallory), 1600);
}

TEST(StepPlanTest, TheFixedPart_IsLearntFromSteps) {
  StepPlan plan(32);
  EXPECT_EQ(plan.fixed_tokens(), 0);
  for (int i = 0; i < 50; ++i) plan.Took(4, absl::Milliseconds(14));
  EXPECT_EQ(plan.fixed_tokens(), 0) << "of one size";
  for (int i = 1; i < 100; ++i) plan.Took(i % 17 + 1, absl::Milliseconds(10 + i % 17 + 1));
  EXPECT_NEAR(plan.fixed_tokens(), 10, 1e-6);
}

TEST(StepPlanTest, APromptAmongManyPrompts_IsReadInTheNextStep) {
  StepPlan plan(32);
  std::deque<StepPlan::Waiting> answers(16, Block(kMallory, 32));
  Serve(plan, answers, 5);
  std::vector<StepPlan::Waiting> waiting(answers.begin(), answers.end());
  waiting.push_back(Block(kAlice, 20));
  const std::vector<size_t> chosen = plan.Next(waiting);
  EXPECT_THAT(chosen, testing::Contains(16));
}

// Whatever waits: no answer stands still, and the smallest turn's tokens go on in each step.
// Two turns read prompts: the short blocks of one leave no room beside them for the long one of the other.
TEST(StepPlanTest, ALongBlock_ComesBetweenShortOnes) {
  StepPlan plan(32);
  for (int64_t step = 0; step < 100;
       ++step) {  // a step costs much beside its tokens: much is given
    plan.Took(step % 2 + 1, absl::Milliseconds(100 + step % 2));
  }
  const std::vector<StepPlan::Waiting> waiting = {Token(kAlice), Block(&kTurns[1], 10),
                                                  Block(&kTurns[1], 10), Block(&kTurns[2], 30)};
  int long_ones = 0;
  for (int step = 0; step < 20; ++step) {
    const std::vector<size_t> chosen = plan.Next(waiting);
    long_ones += std::count(chosen.begin(), chosen.end(), 3u);
  }
  EXPECT_GE(long_ones, 5);
  EXPECT_LE(long_ones, 15);
}

TEST(StepPlanTest, AnyMixture_NoneStandsStillAndTheSmallestNeverWaits) {
  std::mt19937_64 random(TestSeed());
  for (int trial = 0; trial < 200; ++trial) {
    StepPlan plan(32);
    struct One {
      StepPlan::Waiting waiting;
      int64_t since = 0;  // steps
    };
    std::deque<One> answers = {{Token(kAlice)}};  // the smallest turn
    const int turns = static_cast<int>(random() % 3) + 2;
    int64_t all = 1;
    for (int t = 1; t < turns; ++t) {
      for (uint64_t i = 0, n = 1 + random() % 16; i < n; ++i) {
        const auto block = static_cast<int64_t>(1 + random() % 32);
        answers.push_back({random() % 2 == 0 ? Token(&kTurns[t]) : Block(&kTurns[t], block)});
        all += answers.back().waiting.tokens;
      }
    }
    for (int s = 0; s < 500; ++s) {
      std::vector<StepPlan::Waiting> waiting;
      for (const One& one : answers) waiting.push_back(one.waiting);
      const std::vector<size_t> chosen = plan.Next(waiting);
      int64_t tokens = 0;
      for (One& one : answers) ++one.since;
      for (auto it = chosen.rbegin(); it != chosen.rend(); ++it) {
        answers.push_back({answers[*it].waiting});
        answers.erase(answers.begin() + static_cast<int64_t>(*it));
        tokens += waiting[*it].tokens;
      }
      plan.Took(tokens, absl::Milliseconds(3 + tokens));
      for (const One& one : answers) {
        // A token of its turn a step; a block waits for those of all other turns besides.
        const int64_t crowded = turns * static_cast<int64_t>(answers.size());
        const int64_t bound = one.waiting.turn == kAlice ? 0 : all + 32 + crowded;
        ASSERT_LE(one.since, bound) << "trial " << trial << ", step " << s;
      }
    }
  }
}

}  // namespace
}  // namespace carrel::serving
