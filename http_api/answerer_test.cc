// The thread that decodes, with the demo model: whatever its callers do, the others are answered.
#include "http_api/answerer.h"

#include <stdexcept>

#include "absl/synchronization/notification.h"
#include "common/status.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/checkpoint.h"

namespace carrel::http_api {
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
absl::Status Ask(Answerer& answerer) {
  absl::Notification ended;
  absl::Status how;
  AnswerJob job = Question(3);
  job.done = [&](const absl::StatusOr<AnswerJob::Done>& done) {
    how = done.status();
    ended.Notify();
  };
  RETURN_IF_ERROR(answerer.Submit(std::move(job)));
  ended.WaitForNotification();
  return how;
}

TEST(AnswererTest, WhatACallbackThrows_EndsItsJobAlone) {
  const auto answerer = Answerer::Create({}, Demo(), nullptr);
  CARREL_EXPECT_OK(Ask(*answerer));
  for (int round = 0; round < 3; ++round) {
    AnswerJob at_its_end = Question(2), in_the_middle = Question(50), at_once = Question(2);
    at_its_end.done = [](const absl::StatusOr<AnswerJob::Done>&) {
      throw std::runtime_error("planted");
    };
    in_the_middle.on_text = [](const std::string&) -> bool { throw std::runtime_error("planted"); };
    at_once.wanted = []() -> bool { throw std::runtime_error("planted"); };
    for (AnswerJob* job : {&at_its_end, &in_the_middle, &at_once}) {
      CARREL_EXPECT_OK(answerer->Submit(std::move(*job)));
    }
    absl::Status after = Ask(*answerer);
    // Of those that took a step together with one that threw, no one knows how far they came.
    if (!after.ok()) after = Ask(*answerer);
    CARREL_EXPECT_OK(after);
  }
  EXPECT_EQ(answerer->waiting(), 0);
}

TEST(AnswererTest, OfOneTurn_HalfOfThePlacesMayWait) {
  AnswererConfig config;
  config.max_waiting = 4;
  config.max_answers = 1;
  absl::Notification begun, go_on;
  const auto answerer = Answerer::Create(config, Demo(), nullptr);
  AnswerJob first = Question(2);
  first.wanted = [&] {
    if (!begun.HasBeenNotified()) begun.Notify();
    go_on.WaitForNotification();
    return true;
  };
  CARREL_ASSERT_OK(answerer->Submit(std::move(first)));
  begun.WaitForNotification();  // it waits no more
  const auto alice = std::make_shared<const int>(1), bob = std::make_shared<const int>(2);
  const auto submit = [&](const std::shared_ptr<const int>& turn) {
    AnswerJob job = Question(1);
    job.turn = turn;
    return answerer->Submit(std::move(job));
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
}  // namespace carrel::http_api
