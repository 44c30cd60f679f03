// What a scheduler does next, without one: events go in, plans come out.
#include "serving/schedule.h"

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "common/test_random.h"
#include "common/test_util.h"

namespace carrel::serving {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

Turn NewTurn() { return std::make_shared<const int>(0); }

class ScheduleTest : public testing::Test {
 protected:
  explicit ScheduleTest(ScheduleLimits limits = {.places = 2, .prompt_tokens = 32})
      : schedule_(limits) {}

  void Submit(RequestId id, Turn turn = nullptr, const std::string& context = "novel") {
    CARREL_ASSERT_OK(schedule_.Submit(id, std::move(turn), context));
  }
  Plan Next() {
    return schedule_.NextStep([this](RequestId id) { return progress_[id]; });
  }
  // Opens whoever gets a place, until a step is planned.
  std::vector<RequestId> Step() {
    for (;;) {
      const Plan plan = Next();
      for (const RequestId id : plan.end) schedule_.Ended(id);
      for (const RequestId id : plan.open) schedule_.Opened(id);
      if (plan.end.empty() && plan.open.empty()) return plan.step;
    }
  }

  Schedule schedule_;
  std::map<RequestId, Schedule::Progress> progress_;
};

TEST_F(ScheduleTest, NothingIsThere_NothingIsPlanned) {
  EXPECT_TRUE(Next().empty());
  EXPECT_TRUE(schedule_.empty());
}

TEST_F(ScheduleTest, ARequest_IsOpenedThenStepsThenEnds) {
  Submit(1);
  EXPECT_EQ(schedule_.waiting(), 1);
  EXPECT_THAT(Next().open, ElementsAre(1));
  EXPECT_EQ(schedule_.waiting(), 0);
  EXPECT_TRUE(Next().empty()) << "it is being opened";
  schedule_.Opened(1);
  EXPECT_THAT(Next().step, ElementsAre(1));
  EXPECT_THAT(Next().step, ElementsAre(1));
  schedule_.Ended(1);
  EXPECT_TRUE(Next().empty());
  EXPECT_TRUE(schedule_.empty());
}

TEST_F(ScheduleTest, WhileOneOpens_OthersGoOn) {
  Submit(1);
  EXPECT_THAT(Step(), ElementsAre(1));
  Submit(2);
  EXPECT_THAT(Next().open, ElementsAre(2));
  for (int i = 0; i < 3; ++i) EXPECT_THAT(Next().step, ElementsAre(1));
  schedule_.Opened(2);
  EXPECT_THAT(Next().step, UnorderedElementsAre(1, 2));
}

TEST_F(ScheduleTest, WhoIsOpenedAtOnce_TakesPartInTheSameStep) {
  Submit(1);
  Step();
  Submit(2);
  const Plan plan = Next();
  EXPECT_THAT(plan.open, ElementsAre(2));
  EXPECT_THAT(plan.step, IsEmpty());
  schedule_.Opened(2);
  EXPECT_THAT(Next().step, UnorderedElementsAre(1, 2));
}

TEST_F(ScheduleTest, PlacesAreFull_OthersWaitUntilOneEnds) {
  for (RequestId id = 1; id <= 4; ++id) Submit(id);
  EXPECT_THAT(Next().open, ElementsAre(1, 2));
  schedule_.Opened(1);
  schedule_.Opened(2);
  EXPECT_THAT(Next().open, IsEmpty());
  EXPECT_EQ(schedule_.waiting(), 2);
  schedule_.Ended(1);
  EXPECT_THAT(Next().open, ElementsAre(3));
}

TEST_F(ScheduleTest, OneThatOpens_HasAPlace) {
  for (RequestId id = 1; id <= 3; ++id) Submit(id);
  EXPECT_THAT(Next().open, ElementsAre(1, 2));
  EXPECT_THAT(Next().open, IsEmpty());
  schedule_.OpenFailed(1);
  EXPECT_THAT(Next().end, ElementsAre(1));
  schedule_.Ended(1);
  EXPECT_THAT(Next().open, ElementsAre(3));
}

TEST_F(ScheduleTest, AdmissionIsByTurns) {
  const Turn mallory = NewTurn(), alice = NewTurn();
  for (RequestId id = 1; id <= 6; ++id) Submit(id, mallory);
  EXPECT_THAT(Step(), UnorderedElementsAre(1, 2));
  Submit(7, alice);
  EXPECT_THAT(Next().open, ElementsAre(7)) << "a place in reserve";
  Submit(8, alice);
  schedule_.Ended(1);
  schedule_.Opened(7);
  EXPECT_THAT(Next().open, IsEmpty()) << "two are taken, and both have one";
  schedule_.Ended(2);
  EXPECT_THAT(Next().open, ElementsAre(3)) << "who has none";
}

TEST_F(ScheduleTest, OfOneTurnTooManyWait_OthersMayStillCome) {
  Schedule schedule({.places = 1, .waiting = 3, .waiting_of_turn = 2});
  const Turn alice = NewTurn();
  CARREL_EXPECT_OK(schedule.Submit(1, alice, ""));
  CARREL_EXPECT_OK(schedule.Submit(2, alice, ""));
  EXPECT_THAT(schedule.Submit(3, alice, ""),
              StatusIs(absl::StatusCode::kResourceExhausted, "2 answers"));
  CARREL_EXPECT_OK(schedule.Submit(4, NewTurn(), ""));
  EXPECT_THAT(schedule.Submit(5, NewTurn(), ""),
              StatusIs(absl::StatusCode::kResourceExhausted, "3 answers"));
}

TEST_F(ScheduleTest, NoRoomBesideOthers_WaitsAgainWhereItStood_UntilOneEnds) {
  Submit(1);
  Step();
  Submit(2);
  Submit(3);
  EXPECT_THAT(Next().open, ElementsAre(2));
  schedule_.NoRoom(2);
  EXPECT_EQ(schedule_.waiting(), 2);
  for (int i = 0; i < 3; ++i) {
    const Plan plan = Next();
    EXPECT_THAT(plan.open, IsEmpty()) << "nobody is admitted";
    EXPECT_THAT(plan.step, ElementsAre(1));
  }
  schedule_.Ended(1);
  EXPECT_THAT(Next().open, ElementsAre(2, 3)) << "in the order in which they came";
}

TEST_F(ScheduleTest, SeveralWithoutRoom_KeepTheirOrder) {
  Schedule schedule({.places = 8});
  const auto next = [&] {
    return schedule.NextStep([](RequestId) { return Schedule::Progress(); });
  };
  CARREL_ASSERT_OK(schedule.Submit(1, nullptr, ""));
  EXPECT_THAT(next().open, ElementsAre(1));
  schedule.Opened(1);
  for (RequestId id = 2; id <= 4; ++id) CARREL_ASSERT_OK(schedule.Submit(id, nullptr, ""));
  EXPECT_THAT(next().open, ElementsAre(2, 3, 4));
  for (RequestId id = 2; id <= 4; ++id) schedule.NoRoom(id);
  CARREL_ASSERT_OK(schedule.Submit(5, nullptr, ""));
  EXPECT_THAT(next().open, IsEmpty());
  schedule.Ended(1);
  EXPECT_THAT(next().open, ElementsAre(2, 3, 4, 5));
}

TEST_F(ScheduleTest, NoRoomAlone_IsTheEnd) {
  Submit(1);
  Next();
  schedule_.NoRoom(1);
  EXPECT_THAT(Next().end, ElementsAre(1));
  schedule_.Ended(1);
  EXPECT_TRUE(schedule_.empty());
}

TEST_F(ScheduleTest, NoRoomBesideOneThatOpens_IsTriedAgainWhenThatHasFailed) {
  Submit(1);
  Submit(2);
  EXPECT_THAT(Next().open, ElementsAre(1, 2));
  schedule_.NoRoom(1);
  EXPECT_TRUE(Next().empty());
  schedule_.NoRoom(2);  // alone by now
  EXPECT_THAT(Next().end, ElementsAre(2));
  schedule_.Ended(2);
  EXPECT_THAT(Next().open, ElementsAre(1));
}

TEST_F(ScheduleTest, NobodyWaitsForItAnyMore_ItEndsInsteadOfRunning) {
  Submit(1);
  Submit(2);
  Next();
  schedule_.OpenFailed(1);  // whoever opens has looked
  schedule_.Opened(2);
  const Plan plan = Next();
  EXPECT_THAT(plan.end, ElementsAre(1));
  schedule_.Ended(1);
  EXPECT_THAT(Next().step, ElementsAre(2));
}

TEST_F(ScheduleTest, ItsContextIsDeletedMeanwhile_TheOthersGoOn) {
  Submit(1, nullptr, "novel");
  Submit(2, nullptr, "deleted elsewhere");
  Next();
  schedule_.Opened(1);
  schedule_.OpenFailed(2);  // NotFound
  EXPECT_THAT(Next().end, ElementsAre(2));
  schedule_.Ended(2);
  EXPECT_FALSE(schedule_.Reads("deleted elsewhere"));
  EXPECT_THAT(Next().step, ElementsAre(1));
}

TEST_F(ScheduleTest, AContextIsRead_FromWhenItIsAskedUntilTheAnswerHasEnded) {
  EXPECT_FALSE(schedule_.Reads("novel"));
  Submit(1);
  EXPECT_TRUE(schedule_.Reads("novel")) << "it waits to be";
  Next();
  EXPECT_TRUE(schedule_.Reads("novel")) << "it is being opened";
  schedule_.Opened(1);
  Next();
  EXPECT_TRUE(schedule_.Reads("novel"));
  EXPECT_FALSE(schedule_.Reads("another"));
  schedule_.Ended(1);
  EXPECT_FALSE(schedule_.Reads("novel"));
}

TEST_F(ScheduleTest, PutBack_StillReadsItsContext) {
  Submit(1, nullptr, "a");
  Step();
  Submit(2, nullptr, "b");
  Next();
  schedule_.NoRoom(2);
  EXPECT_TRUE(schedule_.Reads("b"));
}

TEST_F(ScheduleTest, AFailedOpening_ReadsItsContextUntilItHasEnded) {
  Submit(1);
  Next();
  schedule_.OpenFailed(1);
  EXPECT_TRUE(schedule_.Reads("novel"));
  for (int i = 0; i < 2; ++i) EXPECT_THAT(Next().end, ElementsAre(1));
  schedule_.Ended(1);
  EXPECT_FALSE(schedule_.Reads("novel"));
}

TEST_F(ScheduleTest, Stop_EndsAllAtOnce_ButForThoseThatOpen) {
  Submit(1);
  Step();
  Submit(2);
  Next();
  Submit(3);
  schedule_.Stop();
  EXPECT_THAT(schedule_.Submit(4, nullptr, ""),
              StatusIs(absl::StatusCode::kUnavailable, "stopping"));
  const Plan plan = Next();
  EXPECT_THAT(plan.end, ElementsAre(1, 3));
  EXPECT_THAT(plan.open, IsEmpty());
  EXPECT_THAT(plan.step, IsEmpty());
  for (const RequestId id : plan.end) schedule_.Ended(id);
  EXPECT_TRUE(Next().empty());
  EXPECT_FALSE(schedule_.empty()) << "one is in somebody's hands";
  schedule_.Opened(2);
  EXPECT_THAT(Next().end, ElementsAre(2));
  schedule_.Ended(2);
  EXPECT_TRUE(schedule_.empty());
}

TEST_F(ScheduleTest, StopBeforeRoomIsFound_ItEnds) {
  Submit(1);
  Step();
  Submit(2);
  Next();
  schedule_.Stop();
  schedule_.NoRoom(2);
  EXPECT_THAT(Next().end, ElementsAre(1, 2));
}

TEST_F(ScheduleTest, Prompts_AreReadUpToTheirBound_WhoWaitedLongestFirst) {
  Schedule schedule({.places = 4, .prompt_tokens = 32});
  const auto next = [&] {
    return schedule.NextStep(
        [](RequestId) { return Schedule::Progress{.tokens = 20, .prompt = true}; });
  };
  for (RequestId id = 1; id <= 3; ++id) CARREL_ASSERT_OK(schedule.Submit(id, nullptr, ""));
  next();
  for (RequestId id = 1; id <= 3; ++id) schedule.Opened(id);
  EXPECT_THAT(next().step, ElementsAre(1));
  EXPECT_THAT(next().step, ElementsAre(2));
  EXPECT_THAT(next().step, ElementsAre(3));
  EXPECT_THAT(next().step, ElementsAre(1));
}

TEST_F(ScheduleTest, StepsAreShared_OneAnswerBesideManyGoesOnInEach) {
  Schedule schedule({.places = 17});
  const Turn mallory = NewTurn(), alice = NewTurn();
  for (RequestId id = 1; id <= 16; ++id) CARREL_ASSERT_OK(schedule.Submit(id, mallory, ""));
  CARREL_ASSERT_OK(schedule.Submit(17, alice, ""));
  const auto next = [&] {
    return schedule.NextStep([](RequestId) { return Schedule::Progress(); });
  };
  for (const RequestId id : next().open) schedule.Opened(id);
  std::map<RequestId, int> taken;
  for (int s = 0; s < 160; ++s) {
    const Plan plan = next();
    for (const RequestId id : plan.step) ++taken[id];
    schedule.Took(static_cast<int64_t>(plan.step.size()), absl::Milliseconds(plan.step.size()));
  }
  EXPECT_EQ(taken[17], 160);
  for (RequestId id = 1; id <= 16; ++id) EXPECT_NEAR(taken[id], 10, 3) << id;
}

// Whatever happens in whatever order: each request ends once, no more have places than may, and none is forgotten.
TEST_F(ScheduleTest, AnyEvents_EachEndsOnceAndNobodyIsForgotten) {
  std::mt19937_64 random(TestSeed());
  for (int trial = 0; trial < 100; ++trial) {
    const auto places = static_cast<int64_t>(1 + random() % 5);
    Schedule schedule({.places = places, .prompt_tokens = 32});
    const Turn turns[] = {NewTurn(), NewTurn(), nullptr};
    std::set<RequestId> opening, running, all, ended;
    const auto end = [&](RequestId id) {
      EXPECT_TRUE(ended.insert(id).second) << id;
      running.erase(id);
      schedule.Ended(id);
    };
    for (RequestId s = 1; s < 2000 && (s < 400 || !schedule.empty()); ++s) {
      if (s < 400 && random() % 3 == 0) {
        CARREL_ASSERT_OK(schedule.Submit(s, turns[random() % 3], "c"));
        all.insert(s);
      }
      if (trial % 2 == 1 && s == 300) schedule.Stop(), s = 400;
      const Plan plan = schedule.NextStep([&](RequestId) {
        return Schedule::Progress{.tokens = static_cast<int64_t>(1 + random() % 32),
                                  .prompt = random() % 2 == 0};
      });
      for (const RequestId id : plan.end) end(id);
      opening.insert(plan.open.begin(), plan.open.end());
      for (const RequestId id : plan.step) {
        EXPECT_TRUE(running.contains(id));
        if (random() % 4 == 0) end(id);
      }
      ASSERT_LE(schedule.admitted(), trial % 2 == 1 && s >= 300 ? 2000 : places + (places + 3) / 4);
      if (opening.empty() || random() % 2 == 0) continue;
      const RequestId id = *opening.begin();
      opening.erase(id);
      switch (random() % 3) {
        case 0:
          schedule.NoRoom(id);
          break;
        case 1:
          schedule.OpenFailed(id);
          break;
        default:
          schedule.Opened(id);
          running.insert(id);
      }
    }
    EXPECT_TRUE(schedule.empty()) << "trial " << trial;
    EXPECT_EQ(ended, all) << "trial " << trial;
  }
}

}  // namespace
}  // namespace carrel::serving
