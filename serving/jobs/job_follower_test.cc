// Jobs as a server shows them: how they go on, wherever they run, and whoever ends them.
#include "serving/jobs/job_follower.h"

#include <thread>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "serving/jobs/serving_test_util.h"

namespace carrel::serving {
namespace {

using absl::StatusCode;
using kvstore::FakeReply;
using kvstore::FakeRequest;
using testing::HasSubstr;

bool Until(const std::function<bool()>& done) {
  for (int i = 0; i < 30000; ++i) {
    if (done()) return true;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return false;
}

class JobFollowerTest : public testing::Test {
 protected:
  std::unique_ptr<kvstore::Bucket> NewBucket() {
    return std::make_unique<kvstore::Bucket>(kvstore::TestClient(fake_.endpoint()), "");
  }
  std::unique_ptr<JobFollower> NewFollower() {
    return std::make_unique<JobFollower>(NewBucket(), std::make_unique<QuietDoorbell>(),
                                         FollowerConfig{.look_every = absl::Milliseconds(10),
                                                        .tell_every = absl::Milliseconds(5),
                                                        .clock = clock_.clock()});
  }
  static JobStatus Submit(JobFollower& follower, const std::string& name, Submitter by = {}) {
    const auto submitted = follower.Submit({.name = name, .model = "demo", .expected_bytes = 100},
                                           name, std::move(by));
    CARREL_CHECK(submitted.ok());
    return submitted->status;
  }
  static bool IsIn(JobFollower& follower, const std::string& name, JobState state) {
    const auto found = follower.Find(name);
    return found.has_value() && found->state == state;
  }
  Worker& NewWorker() {
    WorkerConfig config;
    config.lease = {.worker = "w", .renew_every = absl::Milliseconds(50)};
    config.jitter = absl::ZeroDuration();
    worker_ = std::make_unique<Worker>(board_, runner_, bell_, config);
    return *worker_;
  }

  const std::string folder_ = FreshTempDir();
  kvstore::FakeS3 fake_;
  TestClock clock_;
  std::unique_ptr<kvstore::Bucket> bucket_ = NewBucket();
  JobBoard board_{*bucket_, clock_.clock()};
  FakeRunner runner_{*bucket_, folder_, {"demo"}};
  QuietDoorbell bell_;
  std::unique_ptr<Worker> worker_;
};

TEST_F(JobFollowerTest, WhoWatches_IsToldOfEachStep_WhereverTheJobRuns) {
  const auto here = NewFollower(), there = NewFollower();
  auto place = std::make_shared<int>(0);
  const std::weak_ptr<int> held = place;
  Submit(*here, "report", {.place = std::move(place)});
  EXPECT_FALSE(held.expired());
  EXPECT_TRUE(here->WithoutPlace().empty());
  absl::Mutex mu;
  std::vector<JobState> told[2];
  double progress = 0;
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(Until([&] { return there->Find("report").has_value(); }));
    CARREL_ASSERT_OK((i == 0 ? *here : *there).Watch("report", [&, i](const JobStatus& status) {
      absl::MutexLock lock(&mu);
      if (told[i].empty() || told[i].back() != status.state) told[i].push_back(status.state);
      progress = std::max(progress, status.lease.progress);
      return true;
    }));
  }
  EXPECT_EQ(there->WithoutPlace().size(), 1u);
  EXPECT_EQ(here->queued(), 1);
  runner_.compute = [&](const JobRecord&, const JobControl& control) {
    control.tell(0.5, "half");
    EXPECT_TRUE(Until([&] {
      absl::MutexLock lock(&mu);
      return progress == 0.5 && told[0].size() == 2 && told[1].size() == 2;
    }));
    return absl::OkStatus();
  };
  CARREL_EXPECT_OK(NewWorker().Step());
  EXPECT_TRUE(Until([&] {
    absl::MutexLock lock(&mu);
    return told[0].size() == 3 && told[1].size() == 3;
  }));
  for (const auto& states : told) {
    EXPECT_EQ(states,
              (std::vector<JobState>{JobState::kQueued, JobState::kRunning, JobState::kDone}));
  }
  EXPECT_TRUE(Until([&] { return held.expired(); }));
  EXPECT_EQ(here->Find("report")->end.content_id, bucket_->ReadName("report")->content_id);
}

TEST_F(JobFollowerTest, AJobIsCancelledByAnyone_AndWhoWatchesIsTold) {
  const auto here = NewFollower(), there = NewFollower();
  for (const bool elsewhere : {false, true}) {
    const std::string name = elsewhere ? "b" : "a";
    Submit(*here, name);
    std::atomic<bool> told{false};
    CARREL_ASSERT_OK(here->Watch(name, [&](const JobStatus& status) {
      told = told || status.state == JobState::kCancelled;
      return true;
    }));
    CARREL_EXPECT_OK((elsewhere ? *there : *here).Remove(name, "not needed"));
    EXPECT_TRUE(Until([&] { return told.load(); }));
  }
  EXPECT_FALSE(*NewWorker().Step());
  EXPECT_THAT(here->Remove("none", ""), StatusIs(StatusCode::kNotFound, "none"));
  EXPECT_THAT(here->Watch("none", [](const JobStatus&) { return true; }),
              StatusIs(StatusCode::kNotFound, "none"));
}

TEST_F(JobFollowerTest, WhatFailed_IsSeenByAllUntilSomebodyRemovesIt) {
  const auto here = NewFollower(), there = NewFollower();
  runner_.prepare = [](const JobRecord&) { return absl::InvalidArgumentError("no text"); };
  Submit(*here, "a");
  Submit(*here, "b");
  Worker& worker = NewWorker();
  EXPECT_TRUE(*worker.Step());
  EXPECT_TRUE(*worker.Step());
  for (const char* name : {"a", "b"}) {
    for (JobFollower* one : {here.get(), there.get()}) {
      ASSERT_TRUE(Until([&] { return IsIn(*one, name, JobState::kDead); }));
      EXPECT_THAT(one->Find(name)->reason(), HasSubstr("no text"));
    }
  }
  CARREL_EXPECT_OK(there->Remove("a", ""));
  EXPECT_TRUE(Until([&] { return !here->Find("a").has_value(); }));
  // Brought again it is another attempt, and the failure is forgotten.
  runner_.prepare = nullptr;
  EXPECT_EQ(Submit(*here, "b").record.attempt, 2);
  EXPECT_TRUE(*worker.Step());
  EXPECT_TRUE(Until([&] { return IsIn(*there, "b", JobState::kDone); }));
  EXPECT_EQ(fake_.Objects().count("jobs/dead/" + there->Find("b")->record.id), 0u);
}

TEST_F(JobFollowerTest, WhoseKeyIsWithdrawn_HasHisJobEnd) {
  const auto here = NewFollower();
  std::atomic<bool> may{true};
  const JobStatus job = Submit(*here, "report", {.still = [&]() -> absl::Status {
    if (may) return absl::OkStatus();
    return absl::PermissionDeniedError("withdrawn");
  }});
  may = false;
  EXPECT_TRUE(Until([&] {
    const auto end = board_.FindEnd(job.record.id);
    return end.ok() && end->has_value();
  }));
  EXPECT_EQ(board_.Get(job.record.id)->state, JobState::kCancelled);
  EXPECT_THAT(board_.Get(job.record.id)->reason(), HasSubstr("may not bring it any more"));
}

TEST_F(JobFollowerTest, ABucketThatIsDown_LeavesWhatWasSeen) {
  const auto here = NewFollower();
  Submit(*here, "report");
  std::atomic<int> refused{0};
  fake_.Intercept([&](const FakeRequest&) -> std::optional<FakeReply> {
    ++refused;
    return FakeReply{.status = 403, .body = "<Error><Code>AccessDenied</Code></Error>"};
  });
  EXPECT_TRUE(Until([&] { return refused > 2; }));
  EXPECT_TRUE(IsIn(*here, "report", JobState::kQueued));
  EXPECT_THAT(here->Look(), StatusIs(StatusCode::kPermissionDenied, ""));
  fake_.Intercept(nullptr);
  EXPECT_TRUE(*NewWorker().Step());
  EXPECT_TRUE(Until([&] { return IsIn(*here, "report", JobState::kDone); }));
}

// A look that began before a job was removed has seen it still: it does not come back.
TEST_F(JobFollowerTest, WhatIsRemovedDuringALook_StaysRemoved) {
  JobFollower here(NewBucket(), std::make_unique<QuietDoorbell>(),
                   {.look_every = absl::Hours(1), .clock = clock_.clock()});
  Submit(here, "report");
  EXPECT_TRUE(*NewWorker().Step());
  std::atomic<bool> first{true};
  absl::Notification looks, goes_on;
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    const auto prefix = request.query.find("prefix");
    if (prefix != request.query.end() && absl::StrContains(prefix->second, "dead/") &&
        first.exchange(false)) {
      looks.Notify();
      goes_on.WaitForNotification();
    }
    return std::nullopt;
  });
  std::thread look([&] { CARREL_EXPECT_OK(here.Look()); });
  looks.WaitForNotification();
  const auto removed = here.Remove("report", "cancelled");
  CARREL_EXPECT_OK(removed.status());
  EXPECT_EQ(removed->state, JobState::kDone);
  goes_on.Notify();
  look.join();
  EXPECT_FALSE(here.Find("report").has_value());
}

}  // namespace
}  // namespace carrel::serving
