// The thread that decodes, with the demo model: whatever its callers do, the others are answered.
#include <atomic>
#include <stdexcept>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/checkpoint.h"
#include "serving/scheduler.h"

namespace carrel::serving {
namespace {

std::shared_ptr<library::LoadedModel> Demo() {
  static const auto model =
      *library::LoadedModel::Load(SourceFolder() + "/models/demo", "", /*threads=*/2);
  return model;
}

AnswerJob Question(int64_t max_tokens) {
  AnswerJob job;
  job.prompt = *Demo()->checkpoint().EncodeDocument("Who");
  job.max_tokens = max_tokens;
  job.sampling = {.temperature = 0};
  job.wanted = [] { return true; };
  job.on_text = [](const std::string&) { return true; };
  job.done = [](const absl::StatusOr<AnswerJob::Done>&) {};
  return job;
}

// How one ends that nothing is wrong with.
absl::Status Ask(Scheduler& scheduler) {
  absl::Notification ended;
  absl::Status how;
  AnswerJob job = Question(3);
  job.done = [&](const absl::StatusOr<AnswerJob::Done>& done) {
    how = done.status();
    ended.Notify();
  };
  RETURN_IF_ERROR(scheduler.Submit(std::move(job)));
  ended.WaitForNotification();
  return how;
}

TEST(SchedulerModelTest, WhatACallbackThrows_EndsItsJobAlone) {
  const auto scheduler = Scheduler::Create({}, Demo(), nullptr);
  CARREL_EXPECT_OK(Ask(*scheduler));
  for (int round = 0; round < 3; ++round) {
    AnswerJob at_its_end = Question(2), in_the_middle = Question(50), at_once = Question(2);
    at_its_end.done = [](const absl::StatusOr<AnswerJob::Done>&) {
      throw std::runtime_error("planted");
    };
    in_the_middle.on_text = [](const std::string&) -> bool { throw std::runtime_error("planted"); };
    at_once.wanted = []() -> bool { throw std::runtime_error("planted"); };
    for (AnswerJob* job : {&at_its_end, &in_the_middle, &at_once}) {
      CARREL_EXPECT_OK(scheduler->Submit(std::move(*job)));
    }
    CARREL_EXPECT_OK(Ask(*scheduler));
  }
  EXPECT_EQ(scheduler->waiting(), 0);
}

// Those that take their steps together with one that throws go on.
TEST(SchedulerModelTest, WhatACallbackThrowsInAStep_IsNotTheOthersEnd) {
  const auto scheduler = Scheduler::Create({}, Demo(), nullptr);
  for (const bool by_text : {true, false}) {
    std::atomic<bool> beside{false}, begun{false}, threw{false};
    absl::Notification ended;
    absl::Status how;
    AnswerJob throws = Question(400), goes_on = Question(60);
    const auto maybe_throw = [&] {
      if (beside) {
        threw = true;
        throw std::runtime_error("planted");
      }
      return true;
    };
    throws.on_text = [&, by_text](const std::string&) {
      begun = true;
      return !by_text || maybe_throw();
    };
    if (!by_text) throws.wanted = maybe_throw;
    goes_on.on_text = [&](const std::string&) {
      beside = begun.load();
      return true;
    };
    goes_on.done = [&](const absl::StatusOr<AnswerJob::Done>& done) {
      how = done.status();
      ended.Notify();
    };
    CARREL_ASSERT_OK(scheduler->Submit(std::move(throws)));
    CARREL_ASSERT_OK(scheduler->Submit(std::move(goes_on)));
    ended.WaitForNotification();
    CARREL_EXPECT_OK(how);
    EXPECT_TRUE(threw) << by_text;
    CARREL_EXPECT_OK(Ask(*scheduler));  // and what refers to these variables has ended, too
    while (scheduler->answering() > 0) absl::SleepFor(absl::Milliseconds(1));
  }
}

// How many of one turn, and of nobody's own, may wait beside one that runs.
int64_t MayWait(const SchedulerConfig& config, const Turn& turn) {
  absl::Notification begun, go_on;
  const auto scheduler = Scheduler::Create(config, Demo(), nullptr);
  AnswerJob first = Question(2);
  first.wanted = [&] {
    if (!begun.HasBeenNotified()) begun.Notify();
    go_on.WaitForNotification();
    return true;
  };
  CARREL_EXPECT_OK(scheduler->Submit(std::move(first)));
  begun.WaitForNotification();  // it waits no more
  int64_t waiting = 0;
  for (;; ++waiting) {
    AnswerJob job = Question(1);
    job.turn = turn;
    if (!scheduler->Submit(std::move(job)).ok()) break;
  }
  go_on.Notify();
  return waiting;
}

// Where nobody has a key, one turn is all there are: nobody is to be left room for.
TEST(SchedulerModelTest, WithoutKeys_AsManyMayWaitAsThereArePlaces) {
  SchedulerConfig config;
  config.max_waiting = 6;
  config.max_answers = 1;
  EXPECT_EQ(MayWait(config, std::make_shared<const int>(1)), 6);
  config.max_waiting_of_turn = 3;
  EXPECT_EQ(MayWait(config, std::make_shared<const int>(1)), 3);
  EXPECT_EQ(MayWait(config, nullptr), 6);
}

TEST(SchedulerModelTest, OfOneTurn_HalfOfThePlacesMayWait) {
  SchedulerConfig config;
  config.max_waiting = 4;
  config.max_waiting_of_turn = 2;
  config.max_answers = 1;
  absl::Notification begun, go_on;
  const auto scheduler = Scheduler::Create(config, Demo(), nullptr);
  AnswerJob first = Question(2);
  first.wanted = [&] {
    if (!begun.HasBeenNotified()) begun.Notify();
    go_on.WaitForNotification();
    return true;
  };
  CARREL_ASSERT_OK(scheduler->Submit(std::move(first)));
  begun.WaitForNotification();  // it waits no more
  const auto alice = std::make_shared<const int>(1), bob = std::make_shared<const int>(2);
  const auto submit = [&](const std::shared_ptr<const int>& turn) {
    AnswerJob job = Question(1);
    job.turn = turn;
    return scheduler->Submit(std::move(job));
  };
  CARREL_EXPECT_OK(submit(alice));
  CARREL_EXPECT_OK(submit(alice));
  EXPECT_THAT(submit(alice), StatusIs(absl::StatusCode::kResourceExhausted, "2 answers"));
  CARREL_EXPECT_OK(submit(bob));
  CARREL_EXPECT_OK(submit(bob));
  EXPECT_THAT(submit(std::make_shared<const int>(3)),
              StatusIs(absl::StatusCode::kResourceExhausted, "4 answers"));
  go_on.Notify();
}

}  // namespace
}  // namespace carrel::serving
