// Workers on jobs of a bucket of this process, by a clock that the test sets: nothing here waits for a lease.
#include "serving/jobs/worker.h"

#include <algorithm>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "serving/jobs/serving_test_util.h"

namespace carrel::serving {
namespace {

using absl::StatusCode;
using kvstore::FakeReply;
using kvstore::FakeRequest;
using kvstore::FakeS3;
using testing::HasSubstr;

class WorkerTest : public testing::Test {
 protected:
  // A process of its own: bucket, board, runner, worker.
  struct One {
    std::unique_ptr<kvstore::Bucket> bucket;
    std::unique_ptr<JobBoard> board;
    std::unique_ptr<FakeRunner> runner;
    QuietDoorbell doorbell;
    std::unique_ptr<Worker> worker;
    std::vector<std::string> said;
    bool Step() {
      const absl::StatusOr<bool> more = worker->Step();
      CARREL_CHECK(more.ok());
      return *more;
    }
    WorkerStatistics counts() const { return worker->statistics(); }
  };

  std::unique_ptr<One> NewWorker(const std::string& name,
                                 std::vector<std::string> models = {"demo"},
                                 absl::Duration renew_every = absl::Minutes(20)) {
    auto one = std::make_unique<One>();
    one->bucket = NewBucket();
    one->board = std::make_unique<JobBoard>(*one->bucket, clock_.clock());
    one->runner = std::make_unique<FakeRunner>(*one->bucket, folder_ + "/" + name, models);
    WorkerConfig config;
    // The thread does not renew in a test's time, unless one is about that.
    config.lease = {.worker = name, .time = absl::Minutes(40), .renew_every = renew_every};
    config.jitter = absl::ZeroDuration();
    config.say = [o = one.get()](const std::string& line) { o->said.push_back(line); };
    one->worker = std::make_unique<Worker>(*one->board, *one->runner, one->doorbell, config);
    return one;
  }
  std::unique_ptr<kvstore::Bucket> NewBucket() {
    return std::make_unique<kvstore::Bucket>(kvstore::TestClient(fake_.endpoint()), "");
  }
  JobRecord Submit(const std::string& name, const std::string& text,
                   const std::string& model = "demo", int64_t priority = 5) {
    clock_.Advance(absl::Milliseconds(1));
    const auto submitted =
        board_.Submit({.name = name, .model = model, .priority = priority}, text);
    CARREL_CHECK(submitted.ok());
    return submitted->status.record;
  }
  JobStatus StatusOf(const JobRecord& job) {
    const auto status = board_.Get(job.id);
    CARREL_CHECK(status.ok());
    return *status;
  }
  int Count(const std::string& part) {
    int count = 0;
    for (const auto& [key, bytes] : fake_.Objects()) count += absl::StrContains(key, part) ? 1 : 0;
    return count;
  }
  void ExpectDoneOnce(const JobRecord& job) {
    const JobStatus status = StatusOf(job);
    EXPECT_EQ(status.state, JobState::kDone) << status.reason();
    const auto name = bucket_->ReadName(job.name);
    CARREL_ASSERT_OK(name);
    EXPECT_EQ(name->content_id, status.end.content_id);
    EXPECT_EQ(Count("/queue/") + Count("/leases/") + Count("/documents/"), 0);
    EXPECT_EQ(Count("/manifest"), Count("names/"));
  }

  const std::string folder_ = FreshTempDir();
  FakeS3 fake_;
  TestClock clock_;
  std::unique_ptr<kvstore::Bucket> bucket_ = NewBucket();
  JobBoard board_{*bucket_, clock_.clock()};
};

TEST_F(WorkerTest, Jobs_AreDoneHighestPriorityFirst_ThenOldest) {
  const auto one = NewWorker("a");
  EXPECT_FALSE(one->Step());
  const JobRecord first = Submit("first", "1"), second = Submit("second", "2"),
                  urgent = Submit("urgent", "3", "demo", 9), low = Submit("low", "4", "demo", 1);
  while (one->Step()) {
  }
  EXPECT_EQ(one->runner->ran, (std::vector<std::string>{"urgent", "first", "second", "low"}));
  for (const JobRecord& job : {first, second, urgent, low}) ExpectDoneOnce(job);
  EXPECT_EQ(one->counts().done, 4);
  EXPECT_EQ(one->counts().taken, 4);
  EXPECT_EQ(one->counts().queue, 0);
}

TEST_F(WorkerTest, AModelThatAWorkerLacks_WaitsForOneThatHasIt) {
  const auto demo = NewWorker("a", {"demo"}), other = NewWorker("b", {"other", "third"});
  const JobRecord job = Submit("theirs", "1", "other", 9), mine = Submit("mine", "2");
  EXPECT_TRUE(demo->Step());
  EXPECT_FALSE(demo->Step());
  EXPECT_EQ(demo->counts().queue, 1);
  EXPECT_EQ(demo->counts().fitting, 0);
  EXPECT_EQ(StatusOf(job).state, JobState::kQueued);
  EXPECT_TRUE(other->Step());
  ExpectDoneOnce(job);
  ExpectDoneOnce(mine);
}

TEST_F(WorkerTest, OfTwentyWorkers_OneHasTheJob) {
  const uint64_t seed = TestSeed();
  for (int round = 0; round < 2; ++round) {
    const JobRecord job = Submit(absl::StrCat("job", round), absl::StrCat(seed, "-", round));
    std::vector<std::unique_ptr<One>> workers;
    for (int i = 0; i < 20; ++i) workers.push_back(NewWorker(absl::StrCat("w", round, "-", i)));
    std::vector<std::thread> threads;
    for (const auto& one : workers) threads.emplace_back([&] { (void)one->Step(); });
    for (std::thread& thread : threads) thread.join();
    int ran = 0;
    for (const auto& one : workers) ran += static_cast<int>(one->runner->ran.size());
    EXPECT_EQ(ran, 1);
    ExpectDoneOnce(job);
    EXPECT_EQ(StatusOf(job).end.tries, 1);
  }
}

TEST_F(WorkerTest, ALeaseThatHolds_KeepsOthersOff_OneThatIsOverIsTakenOver) {
  const auto first = NewWorker("a"), second = NewWorker("b");
  const JobRecord job = Submit("report", "1");
  bool looked = false;
  first->runner->compute = [&](const JobRecord&, const JobControl& control) -> absl::Status {
    looked = true;
    EXPECT_FALSE(second->Step()) << "somebody has it";
    EXPECT_EQ(StatusOf(job).state, JobState::kRunning);
    EXPECT_EQ(StatusOf(job).lease.worker, "a");
    CARREL_EXPECT_OK(control.still());
    clock_.Advance(absl::Minutes(41));
    EXPECT_THAT(control.still(), StatusIs(StatusCode::kAborted, "its time was over"));
    EXPECT_EQ(StatusOf(job).state, JobState::kQueued);
    EXPECT_TRUE(second->Step());
    return control.still();
  };
  EXPECT_TRUE(first->Step());
  EXPECT_TRUE(looked);
  ExpectDoneOnce(job);
  EXPECT_EQ(StatusOf(job).end.worker, "b");
  EXPECT_EQ(StatusOf(job).end.tries, 2);
  EXPECT_EQ(first->counts().lost, 1);
  EXPECT_EQ(first->counts().done, 0);
  EXPECT_THAT(first->said.back(), HasSubstr("lease"));
}

// It learns of it at the last moment: the files are there, the manifest is not.
TEST_F(WorkerTest, AWorkerThatLostItsLease_PublishesNothing) {
  const auto first = NewWorker("a"), second = NewWorker("b");
  const JobRecord job = Submit("report", "1");
  int asked = 0;
  first->runner->before_publish = [&] {
    if (++asked != 3) return;  // behind the context's two files
    EXPECT_EQ(Count("names/"), 0);
    clock_.Advance(absl::Minutes(41));
    EXPECT_TRUE(second->Step());
    EXPECT_EQ(Count("names/"), 1);
  };
  EXPECT_TRUE(first->Step());
  EXPECT_GE(asked, 3);
  ExpectDoneOnce(job);
  EXPECT_EQ(StatusOf(job).end.worker, "b");
  EXPECT_EQ(first->counts().lost, 1);
}

// Lost between the last look and the name: the name has one winner, and the job one result.
TEST_F(WorkerTest, ASecondResult_IsDiscarded) {
  const auto first = NewWorker("a"), second = NewWorker("b");
  const JobRecord job = Submit("report", "1");
  bool done = false;
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    if (done || request.method != "PUT" || request.key != "names/report") return std::nullopt;
    done = true;
    clock_.Advance(absl::Minutes(41));
    EXPECT_TRUE(second->Step());
    return std::nullopt;
  });
  EXPECT_TRUE(first->Step());
  EXPECT_TRUE(done);
  ExpectDoneOnce(job);
  EXPECT_EQ(StatusOf(job).end.worker, "b");
  EXPECT_EQ(second->counts().done, 1);
}

TEST_F(WorkerTest, AResultBehindACancellation_IsTakenBack) {
  const auto one = NewWorker("a");
  const JobRecord job = Submit("report", "1");
  bool done = false;
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    const bool result = request.method == "PUT" && absl::StartsWith(request.key, "jobs/results/");
    if (done || !result) return std::nullopt;
    done = true;
    EXPECT_EQ(Count("names/"), 1);
    CARREL_EXPECT_OK(board_.Cancel(job.id, "too late?"));
    return std::nullopt;
  });
  EXPECT_TRUE(one->Step());
  EXPECT_TRUE(done);
  EXPECT_EQ(StatusOf(job).state, JobState::kCancelled);
  EXPECT_EQ(Count("names/") + Count("/manifest"), 0);
  EXPECT_EQ(one->counts().cancelled, 1);
}

TEST_F(WorkerTest, ACancelledJob_StopsWhereItIs_AndLeavesNothing) {
  const auto one = NewWorker("a", {"demo"}, absl::Milliseconds(50));
  const JobRecord job = Submit("report", "1");
  one->runner->compute = [&](const JobRecord&, const JobControl& control) {
    control.tell(0.5, "layer 4 of 8");
    while (StatusOf(job).lease.progress != 0.5) {
    }
    EXPECT_EQ(StatusOf(job).lease.where, "layer 4 of 8");
    CARREL_EXPECT_OK(board_.Cancel(job.id, "not needed"));
    absl::Status still;
    while ((still = control.still()).ok()) absl::SleepFor(absl::Milliseconds(1));
    return still;
  };
  EXPECT_TRUE(one->Step());
  EXPECT_EQ(StatusOf(job).state, JobState::kCancelled);
  EXPECT_EQ(StatusOf(job).reason(), "not needed");
  EXPECT_EQ(one->counts().cancelled, 1);
  EXPECT_EQ(one->runner->forgotten, std::vector<std::string>{"report"});
  EXPECT_EQ(Count("/queue/") + Count("/leases/") + Count("/documents/") + Count("names/"), 0);
}

TEST_F(WorkerTest, ALeaseThatIsGone_IsNotRenewed) {
  const JobRecord job = Submit("report", "1");
  const auto open = board_.Open(nullptr);
  CARREL_ASSERT_OK(open);
  const LeaseConfig config{.worker = "x", .renew_every = absl::Seconds(15)};
  const auto lease = HeldLease::Take(board_, open->at(0), config);
  CARREL_ASSERT_OK(lease);
  ASSERT_NE(*lease, nullptr);
  const auto other = HeldLease::Take(board_, open->at(0), {.worker = "y"});
  CARREL_ASSERT_OK(other);
  EXPECT_EQ(*other, nullptr);
  CARREL_EXPECT_OK((*lease)->Renew());
  CARREL_EXPECT_OK(board_.Cancel(job.id, "not needed"));
  CARREL_EXPECT_OK((*lease)->Held());
  EXPECT_THAT((*lease)->Renew(), StatusIs(StatusCode::kAborted, job.id));
  EXPECT_THAT((*lease)->Held(), StatusIs(StatusCode::kAborted, job.id));
  EXPECT_EQ(Count("/leases/"), 0);
}

// A renewal that was made although its reply was lost: the lease is ours all the same.
TEST_F(WorkerTest, ARenewalWhoseReplyWasLost_Counts) {
  Submit("report", "1");
  const auto open = board_.Open(nullptr);
  CARREL_ASSERT_OK(open);
  const auto lease = HeldLease::Take(board_, open->at(0), {.worker = "x"});
  CARREL_ASSERT_OK(lease);
  JobLease ours = (*lease)->taken();
  ours.progress = 0.75;  // as if it had been written, and we were told nothing
  ASSERT_TRUE(
      bucket_->client().Put(board_.LeaseKey(open->at(0).status.record.id), ours.Encode()).ok());
  CARREL_EXPECT_OK((*lease)->Renew());
  CARREL_EXPECT_OK((*lease)->Held());
  ours.worker = "y";
  ASSERT_TRUE(
      bucket_->client().Put(board_.LeaseKey(open->at(0).status.record.id), ours.Encode()).ok());
  EXPECT_THAT((*lease)->Renew(), StatusIs(StatusCode::kAborted, "another worker has it"));
}

TEST_F(WorkerTest, ThreeTries_ThenADeadLetterWithTheReason) {
  const auto one = NewWorker("a");
  const JobRecord job = Submit("report", "1");
  one->runner->compute = [](const JobRecord&, const JobControl&) {
    return absl::ResourceExhaustedError("the disk is full");
  };
  for (int tries = 1; tries < kMostTries; ++tries) {
    EXPECT_TRUE(one->Step());
    EXPECT_EQ(StatusOf(job).state, JobState::kQueued);
    EXPECT_THAT(StatusOf(job).reason(), HasSubstr("the disk is full"));
    EXPECT_EQ(StatusOf(job).lease.tries, tries);
    EXPECT_FALSE(one->Step()) << "not at once";
    clock_.Advance(absl::Minutes(1));
  }
  EXPECT_TRUE(one->Step());
  const JobStatus dead = StatusOf(job);
  EXPECT_EQ(dead.state, JobState::kDead);
  EXPECT_EQ(dead.end.tries, kMostTries);
  EXPECT_EQ(dead.reason(), "RESOURCE_EXHAUSTED: the disk is full");
  EXPECT_THAT(fake_.Objects().at("jobs/dead/" + job.id), HasSubstr("the disk is full"));
  EXPECT_EQ(Count("/queue/") + Count("/leases/"), 0);
  EXPECT_FALSE(one->Step());
  EXPECT_EQ(one->counts().dead, 1);
  EXPECT_EQ(one->counts().failed, 3);
  // It can be asked for again.
  one->runner->compute = nullptr;
  const JobRecord again = Submit("report", "1");
  EXPECT_EQ(again.attempt, 2);
  EXPECT_TRUE(one->Step());
  EXPECT_EQ(StatusOf(again).state, JobState::kDone);
}

// Killed each time: nobody says why.
TEST_F(WorkerTest, AJobThatKillsItsWorkers_IsGivenUp) {
  const auto one = NewWorker("a");
  const JobRecord job = Submit("report", "1");
  for (int tries = 1; tries <= kMostTries; ++tries) {
    const auto open = one->board->Open(nullptr);
    CARREL_ASSERT_OK(open);
    const auto lease = HeldLease::Take(*one->board, open->at(0), {.worker = "dies"});
    CARREL_ASSERT_OK(lease);
    ASSERT_NE(*lease, nullptr);
    EXPECT_EQ((*lease)->taken().tries, tries);
    clock_.Advance(absl::Minutes(1));
  }
  EXPECT_TRUE(one->Step());
  EXPECT_EQ(StatusOf(job).state, JobState::kDead);
  EXPECT_THAT(StatusOf(job).reason(), HasSubstr("worker dies did not come back"));
  EXPECT_TRUE(one->runner->ran.empty());
}

TEST_F(WorkerTest, WhatNoTryCanChange_IsGivenUpAtOnce) {
  const auto one = NewWorker("a");
  const JobRecord job = Submit("report", "1");
  one->runner->prepare = [](const JobRecord&) { return absl::InvalidArgumentError("no text"); };
  EXPECT_TRUE(one->Step());
  EXPECT_EQ(StatusOf(job).state, JobState::kDead);
  EXPECT_EQ(StatusOf(job).end.tries, 1);
  one->runner->prepare = nullptr;
  // The name is another context's by now.
  const JobRecord taken = Submit("taken", "2");
  ASSERT_TRUE(bucket_->client()
                  .Put("names/taken", kvstore::BoundName{.context_id = std::string(32, 'a'),
                                                         .content_id = std::string(64, 'b')}
                                          .Encode())
                  .ok());
  EXPECT_TRUE(one->Step());
  EXPECT_EQ(StatusOf(taken).state, JobState::kDead);
  EXPECT_THAT(StatusOf(taken).reason(), HasSubstr("the name is bound to content id"));
}

// Killed between the context and its result: the next worker computes nothing.
TEST_F(WorkerTest, AContextThatIsThere_IsTheResult) {
  const auto first = NewWorker("a"), second = NewWorker("b");
  const JobRecord job = Submit("report", "1");
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.method != "PUT" || !absl::StartsWith(request.key, "jobs/results/")) {
      return std::nullopt;
    }
    return FakeReply{.status = 403, .body = "<Error><Code>AccessDenied</Code></Error>"};
  });
  EXPECT_FALSE(first->worker->Step().ok());
  EXPECT_EQ(Count("names/"), 1);
  fake_.Intercept(nullptr);
  EXPECT_FALSE(second->Step());
  clock_.Advance(absl::Minutes(41));
  EXPECT_TRUE(second->Step());
  EXPECT_TRUE(second->runner->ran.empty());
  EXPECT_EQ(second->counts().found, 1);
  ExpectDoneOnce(job);
}

// At the last of its tries, too.
TEST_F(WorkerTest, AContextOfTheLastTry_IsTheResult) {
  const auto one = NewWorker("a");
  const JobRecord job = Submit("report", "1");
  const JobLease used_up{.worker = "b", .tries = kMostTries - 1, .until = clock_.Now()};
  ASSERT_TRUE(bucket_->client().Put(board_.LeaseKey(job.id), used_up.Encode()).ok());
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.method != "PUT" || !absl::StartsWith(request.key, "jobs/results/")) {
      return std::nullopt;
    }
    return FakeReply{.status = 403, .body = "<Error><Code>AccessDenied</Code></Error>"};
  });
  EXPECT_FALSE(one->worker->Step().ok());
  fake_.Intercept(nullptr);
  clock_.Advance(absl::Minutes(41));
  EXPECT_TRUE(one->Step());
  ExpectDoneOnce(job);
  EXPECT_EQ(StatusOf(job).end.tries, kMostTries);
}

// Killed behind the result: what is left of the open job goes.
TEST_F(WorkerTest, AJobThatHasEnded_IsCleanedUpAndNotDoneAgain) {
  const auto one = NewWorker("a");
  const JobRecord job = Submit("report", "1");
  EXPECT_TRUE(one->Step());
  ASSERT_TRUE(bucket_->client().Put(board_.QueueKey(job), "").ok());  // a doorbell's echo
  EXPECT_TRUE(one->Step());
  EXPECT_EQ(one->runner->ran.size(), 1u);
  ExpectDoneOnce(job);
}

TEST_F(WorkerTest, AWorkerThatStops_GivesItsJobBack) {
  const auto first = NewWorker("a"), second = NewWorker("b");
  const JobRecord job = Submit("report", "1");
  first->runner->compute = [&](const JobRecord&, const JobControl& control) {
    first->worker->Stop();
    return control.still();
  };
  first->worker->Run();
  EXPECT_EQ(first->counts().given_back, 1);
  EXPECT_EQ(StatusOf(job).state, JobState::kQueued);
  EXPECT_EQ(StatusOf(job).lease.tries, 0) << "it is no try of the job's";
  EXPECT_TRUE(second->Step());
  ExpectDoneOnce(job);
}

// Objects of any kind in the queue and among the records: the worker says so, and does what is left.
TEST_F(WorkerTest, BadObjects_AreRefusedByName_AndStopNobody) {
  std::mt19937_64 random(TestSeed());
  const auto one = NewWorker("a");
  std::vector<JobRecord> bad;
  for (int i = 0; i < 20; ++i) {
    bad.push_back(Submit(absl::StrCat("bad", i), absl::StrCat("bad", i), "demo", 9));
    fake_.Change("jobs/records/" + bad.back().id,
                 [&](std::string& bytes) { bytes = bytes.substr(0, random() % bytes.size()); });
  }
  for (const char* key : {"jobs/queue/x", "jobs/queue/", "jobs/leases/y", "jobs/queue/a/b"}) {
    ASSERT_TRUE(bucket_->client().Put(key, "{").ok());
  }
  const JobRecord good = Submit("good", "1");
  ASSERT_TRUE(bucket_->client().Put(board_.LeaseKey(good.id), "no lease").ok());
  EXPECT_TRUE(one->Step());
  EXPECT_EQ(one->runner->ran, std::vector<std::string>{"good"});
  EXPECT_EQ(StatusOf(good).state, JobState::kDone);
  EXPECT_EQ(one->counts().refused, 23);
  for (const JobRecord& job : bad) {
    EXPECT_EQ(board_.FindEnd(job.id)->value().state, JobState::kDead);
  }
  const size_t said = one->said.size();
  EXPECT_FALSE(one->Step());
  EXPECT_EQ(one->said.size(), said) << "once is enough";
}

TEST_F(WorkerTest, ABucketThatIsDown_IsAskedAgain) {
  const auto one = NewWorker("a");
  const JobRecord job = Submit("report", "1");
  std::atomic<bool> down{true};
  std::atomic<int> refused{0};
  fake_.Intercept([&](const FakeRequest&) -> std::optional<FakeReply> {
    if (!down) return std::nullopt;
    ++refused;
    return FakeReply{.status = 403, .body = "<Error><Code>AccessDenied</Code></Error>"};
  });
  EXPECT_THAT(one->worker->Step(), StatusIs(StatusCode::kPermissionDenied, "AccessDenied"));
  std::thread run([&] { one->worker->Run(); });
  while (refused < 3) {
    absl::SleepFor(absl::Milliseconds(1));
    one->doorbell.Wake();
  }
  down = false;
  while (one->counts().done == 0) {
    absl::SleepFor(absl::Milliseconds(1));
    one->doorbell.Wake();
  }
  one->worker->Stop();
  run.join();
  ExpectDoneOnce(job);
  EXPECT_EQ(
      std::count_if(one->said.begin(), one->said.end(),
                    [](const std::string& s) { return absl::StrContains(s, "cannot be used"); }),
      1);
}

}  // namespace
}  // namespace carrel::serving
