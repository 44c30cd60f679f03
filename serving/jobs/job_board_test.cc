// Jobs are submitted, looked at, cancelled, in a bucket of this process.
#include "serving/jobs/job_board.h"

#include <random>
#include <thread>

#include "serving/jobs/serving_test_util.h"

namespace carrel::serving {
namespace {

using absl::StatusCode;
using kvstore::FakeReply;
using kvstore::FakeRequest;
using kvstore::FakeS3;

class JobBoardTest : public testing::Test {
 protected:
  std::unique_ptr<kvstore::Bucket> NewBucket() {
    return std::make_unique<kvstore::Bucket>(kvstore::TestClient(fake_.endpoint()), "pre/");
  }
  static JobRecord Wanted(const std::string& name) { return {.name = name, .model = "demo"}; }
  JobStatus Submit(const std::string& name, const std::string& text, int64_t priority = 5) {
    JobRecord job = Wanted(name);
    job.priority = priority;
    const auto submitted = board_.Submit(job, text);
    CARREL_CHECK(submitted.ok());
    return submitted->status;
  }
  std::vector<std::string> OpenNames() {
    std::vector<std::string> names;
    const auto open = board_.Open(nullptr);
    CARREL_CHECK(open.ok());
    for (const OpenJob& job : *open) names.push_back(job.status.record.name);
    return names;
  }
  int Count(const std::string& part) {
    int count = 0;
    for (const auto& [key, bytes] : fake_.Objects()) count += absl::StrContains(key, part) ? 1 : 0;
    return count;
  }

  FakeS3 fake_;
  TestClock clock_;
  std::unique_ptr<kvstore::Bucket> bucket_ = NewBucket();
  JobBoard board_{*bucket_, clock_.clock()};
};

TEST_F(JobBoardTest, Jobs_WaitByPriorityThenAge) {
  Submit("usual", "1");
  clock_.Advance(absl::Seconds(1));
  Submit("low", "2", 0);
  clock_.Advance(absl::Seconds(1));
  Submit("later", "3");
  clock_.Advance(absl::Seconds(1));
  Submit("high", "4", 9);
  EXPECT_EQ(OpenNames(), (std::vector<std::string>{"high", "usual", "later", "low"}));
  for (const auto& [key, bytes] : fake_.Objects()) EXPECT_TRUE(absl::StartsWith(key, "pre/jobs/"));
}

TEST_F(JobBoardTest, TheSameDocument_IsTheSameJobWhileItIsOpen) {
  const JobStatus first = Submit("report", "text");
  const auto again = board_.Submit(Wanted("report"), "text");
  CARREL_ASSERT_OK(again);
  EXPECT_TRUE(again->existed);
  EXPECT_EQ(again->status.record.id, first.record.id);
  EXPECT_EQ(Count("/queue/"), 1);
  EXPECT_THAT(board_.Submit(Wanted("other"), "text"),
              StatusIs(StatusCode::kAlreadyExists, "\"report\" (job " + first.record.id));
  EXPECT_THAT(board_.Submit(Wanted("report"), "another text"),
              StatusIs(StatusCode::kAlreadyExists, "is being made by job " + first.record.id));
  // Who may not be told of the name has a job of his own.
  const auto hidden = board_.Submit(Wanted("other"), "text",
                                    [](const std::string& name) { return name == "other"; });
  CARREL_ASSERT_OK(hidden);
  EXPECT_FALSE(hidden->existed);
  EXPECT_EQ(hidden->status.record.attempt, 2);
  EXPECT_EQ(Count("/queue/"), 2);
}

TEST_F(JobBoardTest, AJobThatEnded_IsAskedForAgainAsTheNextAttempt) {
  const JobStatus first = Submit("report", "text");
  const auto cancelled = board_.Cancel(first.record.id, "not needed");
  CARREL_ASSERT_OK(cancelled);
  EXPECT_EQ(cancelled->state, JobState::kCancelled);
  EXPECT_EQ(Count("/queue/") + Count("/documents/") + Count("/leases/"), 0);
  const auto read = board_.Get(first.record.id);
  CARREL_ASSERT_OK(read);
  EXPECT_EQ(read->reason(), "not needed");
  const JobStatus second = Submit("report", "text");
  EXPECT_EQ(second.record.attempt, 2);
  EXPECT_NE(second.record.id, first.record.id);
  EXPECT_EQ(board_.Find("report")->record.id, second.record.id);
  EXPECT_EQ(board_.Find(first.record.id.substr(0, 10))->record.id, first.record.id);
  EXPECT_EQ(board_.Cancel(first.record.id, "again")->end.reason, "not needed");
  // One that is done counts as long as its context is there.
  CARREL_ASSERT_OK(board_.End(second.record, {.state = JobState::kDone,
                                              .content_id = Sha256Hex("c"),
                                              .context_id = std::string(32, 'a')}));
  EXPECT_EQ(Submit("report", "text").record.attempt, 3);
}

TEST_F(JobBoardTest, AnEnd_ShutsOutEveryOther) {
  const JobStatus job = Submit("report", "text");
  const auto first = board_.End(job.record, {.state = JobState::kDead, .reason = "one"});
  CARREL_ASSERT_OK(first);
  EXPECT_TRUE(first->ours);
  const auto second = board_.End(job.record, {.state = JobState::kDead, .reason = "two"});
  CARREL_ASSERT_OK(second);
  EXPECT_FALSE(second->ours);
  EXPECT_EQ(second->end.reason, "one");
  CARREL_ASSERT_OK(board_.CleanUp(job.record, second->end));
  EXPECT_EQ(Count("/dead/"), 1);
  EXPECT_EQ(Count("/documents/"), 1) << "who looks why it failed may want it";
  EXPECT_EQ(Count("/queue/"), 0);
}

// Submitters that were killed between two of their PUTs, at each of them.
TEST_F(JobBoardTest, ASubmissionThatBrokeOff_IsDoneByTheSameCall) {
  for (const char* broken : {"/documents/", "/records/", "/queue/"}) {
    const std::string name = absl::StrCat("n", std::string(broken).substr(1, 4));
    fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
      if (request.method != "PUT" || !absl::StrContains(request.key, broken)) return std::nullopt;
      return FakeReply{.status = 403, .body = "<Error><Code>AccessDenied</Code></Error>"};
    });
    EXPECT_THAT(board_.Submit(Wanted(name), broken),
                StatusIs(StatusCode::kPermissionDenied, broken));
    EXPECT_EQ(OpenNames().size(), 0u);
    fake_.Intercept(nullptr);
    const auto again = board_.Submit(Wanted(name), broken);
    CARREL_ASSERT_OK(again);
    EXPECT_EQ(OpenNames(), std::vector<std::string>{name});
    EXPECT_EQ(*board_.ReadDocument(again->status.record), broken);
    CARREL_ASSERT_OK(board_.Cancel(again->status.record.id, ""));
  }
}

TEST_F(JobBoardTest, TwentySubmitters_MakeOneJob) {
  std::vector<std::thread> threads;
  std::atomic<int> made{0}, existed{0};
  for (int i = 0; i < 20; ++i) {
    threads.emplace_back([&] {
      const auto bucket = NewBucket();
      JobBoard board(*bucket, clock_.clock());
      const auto submitted = board.Submit(Wanted("report"), "text");
      CARREL_CHECK(submitted.ok());
      ++(submitted->existed ? existed : made);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 1);
  EXPECT_EQ(existed, 19);
  EXPECT_EQ(OpenNames().size(), 1u);
}

TEST_F(JobBoardTest, WhatIsNoJob_IsNamedAndTheOthersAreThere) {
  const JobStatus good = Submit("good", "1"), damaged = Submit("damaged", "2"),
                  gone = Submit("gone", "3");
  fake_.Change("pre/jobs/records/" + damaged.record.id,
               [](std::string& bytes) { bytes[10] = '}'; });
  const auto fresh = NewBucket();
  CARREL_ASSERT_OK(fresh->client().Remove("pre/jobs/records/" + gone.record.id));
  CARREL_ASSERT_OK(fresh->client().Put("pre/jobs/queue/what-is-this", "x"));
  JobBoard board(*fresh, clock_.clock());
  std::vector<BadJob> bad;
  const auto open = board.Open(&bad);
  CARREL_ASSERT_OK(open);
  ASSERT_EQ(open->size(), 1u);
  EXPECT_EQ(open->at(0).status.record.id, good.record.id);
  ASSERT_EQ(bad.size(), 3u);
  for (const BadJob& one : bad) CARREL_EXPECT_OK(board.PutAway(one));
  EXPECT_EQ(board.FindEnd(damaged.record.id)->value().state, JobState::kDead);
  EXPECT_FALSE(board.FindEnd(gone.record.id)->has_value());
  bad.clear();
  CARREL_ASSERT_OK(board.Open(&bad));
  ASSERT_EQ(bad.size(), 1u) << "it is not ours to remove";
  EXPECT_THAT(bad[0].error, StatusIs(StatusCode::kDataLoss, "what-is-this"));
}

TEST_F(JobBoardTest, ASweep_TakesWhatEndedOrBelongsToNothing_AndSparesWhatWaits) {
  const JobStatus open = Submit("open", "1"), cancelled = Submit("cancelled", "2"),
                  dead = Submit("dead", "3"), half = Submit("half", "4");
  CARREL_ASSERT_OK(board_.Cancel(cancelled.record.id, ""));
  CARREL_ASSERT_OK(board_.End(dead.record, {.reason = "x"}));
  CARREL_ASSERT_OK(board_.CleanUp(dead.record, {.reason = "x"}));
  CARREL_ASSERT_OK(bucket_->client().Remove(board_.QueueKey(half.record)));  // never enqueued
  const auto swept = [&](absl::Duration grace, bool dry_run) {
    const auto done = SweepJobs(board_, grace, dry_run);
    CARREL_CHECK(done.ok());
    return std::make_pair(done->ended, done->leftovers);
  };
  using Counts = std::pair<int64_t, int64_t>;
  const size_t before = fake_.Objects().size();
  EXPECT_EQ(swept(absl::Hours(1), false), Counts(0, 0)) << "all is young";
  fake_.Age(absl::Hours(2));
  EXPECT_EQ(swept(absl::Hours(1), true), Counts(2, 2));
  EXPECT_EQ(fake_.Objects().size(), before);
  EXPECT_EQ(swept(absl::Hours(1), false), Counts(2, 2));
  EXPECT_EQ(fake_.Objects().size(), 3u) << "record, document and place in the queue of one";
  EXPECT_EQ(OpenNames(), std::vector<std::string>{"open"});
  EXPECT_EQ(Submit("cancelled", "2").record.attempt, 1);
}

TEST_F(JobBoardTest, ADocumentThatIsAnother_IsRefused) {
  const JobStatus job = Submit("report", "text");
  fake_.Change("pre/jobs/documents/" + job.record.id, [](std::string& bytes) { bytes[0] = 'T'; });
  EXPECT_THAT(board_.ReadDocument(job.record), StatusIs(StatusCode::kDataLoss, "documents/"));
}

TEST_F(JobBoardTest, WhatNobodyMaySubmit_IsRefused) {
  EXPECT_THAT(board_.Submit(Wanted("a/b"), "text"), StatusIs(StatusCode::kInvalidArgument, "a/b"));
  EXPECT_THAT(board_.Submit(Wanted("a"), ""), StatusIs(StatusCode::kInvalidArgument, "0 bytes"));
  JobRecord job = Wanted("a");
  job.priority = 10;
  EXPECT_THAT(board_.Submit(job, "x"), StatusIs(StatusCode::kInvalidArgument, "priority=10"));
  job = Wanted("a");
  job.index = "best";
  EXPECT_THAT(board_.Submit(job, "x"), StatusIs(StatusCode::kInvalidArgument, "best"));
  EXPECT_THAT(board_.Get(std::string(64, '0')), StatusIs(StatusCode::kNotFound, "000"));
  EXPECT_THAT(board_.Find("none"), StatusIs(StatusCode::kNotFound, "none"));
  EXPECT_EQ(fake_.Objects().size(), 0u);
}

}  // namespace
}  // namespace carrel::serving
