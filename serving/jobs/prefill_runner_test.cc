// Jobs through the demo model: into a bucket of this process, interrupted, gone on with, forgotten.
#include "serving/jobs/prefill_runner.h"

#include <random>

#include "common/test_folders.h"
#include "serving/jobs/serving_test_util.h"

namespace carrel::serving {
namespace {

using absl::StatusCode;

constexpr char kText[] =
    "Miathlio Ceatiabu has badge number 887243. The rest of this text says nothing.";

class PrefillRunnerTest : public testing::Test {
 protected:
  static const model::Checkpoint& Demo() {
    static const auto& demo = *new absl::StatusOr<model::Checkpoint>(
        model::LoadCheckpoint(SourceFolder() + "/models/demo", nullptr));
    CARREL_CHECK(demo.ok());
    return *demo;
  }
  static RunnableModel Runnable(const std::string& name = "demo") {
    return {.name = name, .checkpoint = &Demo(), .encode = [](const std::string& text, bool, bool) {
              return Demo().EncodeDocument(text, nullptr);
            }};
  }
  std::unique_ptr<PrefillRunner> NewRunner() {
    auto runner =
        PrefillRunner::Create({.folder = folder_ + "/work"}, bucket_, {Runnable()}, &pool_);
    CARREL_CHECK(runner.ok());
    return *std::move(runner);
  }
  JobRecord Submit(JobRecord record, const std::string& document) {
    const auto submitted = board_.Submit(std::move(record), document);
    CARREL_CHECK(submitted.ok());
    return submitted->status.record;
  }
  static std::string Bytes(const std::vector<TokenId>& tokens) {
    return std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 4);
  }
  JobControl Control() {
    return {.still = [this] { return still_; },
            .tell = [this](double share, const std::string&) { shares_.push_back(share); }};
  }

  const std::string folder_ = FreshTempDir();
  kvstore::FakeS3 fake_;
  kvstore::Bucket bucket_{kvstore::TestClient(fake_.endpoint()), ""};
  TestClock clock_;
  JobBoard board_{bucket_, clock_.clock()};
  ThreadPool pool_{1};
  absl::Status still_;
  std::vector<double> shares_;
};

TEST_F(PrefillRunnerTest, TextAndTokens_BecomeTheSameDocument) {
  const auto runner = NewRunner();
  const JobRecord text = Submit({.name = "text", .model = "demo"}, kText);
  EXPECT_TRUE(runner->Fits(text));
  const auto prepared = runner->Prepare(text, kText);
  CARREL_ASSERT_OK(prepared);
  const auto done = (*prepared)->Run(Control());
  CARREL_ASSERT_OK(done);
  const auto name = bucket_.ReadName("text");
  CARREL_ASSERT_OK(name);
  EXPECT_EQ(name->content_id, done->content_id);
  EXPECT_EQ(name->context_id, done->context_id);
  EXPECT_EQ(name->tokens, done->tokens);
  EXPECT_GT(shares_.back(), 0.9);
  const auto tokens = Demo().EncodeDocument(kText);
  CARREL_ASSERT_OK(tokens);
  const JobRecord ids = Submit({.name = "tokens",
                                .model = "whatever",
                                .fingerprint = FingerprintDigest(Demo().fingerprint),
                                .form = DocumentForm::kTokens},
                               Bytes(*tokens));
  EXPECT_TRUE(runner->Fits(ids));
  const auto same = runner->Prepare(ids, Bytes(*tokens));
  CARREL_ASSERT_OK(same);
  EXPECT_EQ((*same)->token_ids_sha256(), (*prepared)->token_ids_sha256());
  const auto found =
      FindSameContext(bucket_, "text", (*same)->token_ids_sha256(), (*same)->fingerprint());
  CARREL_ASSERT_OK(found);
  EXPECT_TRUE(found->has_value());
  EXPECT_THAT(FindSameContext(bucket_, "text", Sha256Hex("x"), (*same)->fingerprint()),
              StatusIs(StatusCode::kAlreadyExists, "names/text"));
}

TEST_F(PrefillRunnerTest, WhatNoModelHereReads_IsRefused) {
  const auto runner = NewRunner();
  EXPECT_FALSE(runner->Fits(Submit({.name = "a", .model = "other"}, "x")));
  const JobRecord job = Submit({.name = "b",
                                .model = "demo",
                                .fingerprint = Sha256Hex("another demo"),
                                .form = DocumentForm::kTokens},
                               "1234");
  EXPECT_FALSE(runner->Fits(job));
  JobRecord ours = job;
  ours.fingerprint = FingerprintDigest(Demo().fingerprint);
  EXPECT_THAT(runner->Prepare(ours, Bytes({1, 2, 1 << 30})),
              StatusIs(StatusCode::kInvalidArgument, "1073741824"));
  EXPECT_THAT(PrefillRunner::Create({.folder = folder_ + "/other"}, bucket_,
                                    {Runnable("x"), Runnable("x")}, &pool_),
              StatusIs(StatusCode::kInvalidArgument, "two models are called x"));
  EXPECT_THAT(PrefillRunner::Create({.folder = folder_ + "/work"}, bucket_, {Runnable()}, &pool_),
              StatusIs(StatusCode::kFailedPrecondition, "work"));
}

// In the middle of a layer, and between the last layer and the bucket.
TEST_F(PrefillRunnerTest, AJobThatWasInterrupted_PublishesNothing_AndIsGoneOnWith) {
  auto runner = NewRunner();
  const JobRecord job = Submit({.name = "report", .model = "demo"}, kText);
  const auto run = [&](int calls) {
    const auto prepared = runner->Prepare(job, kText);
    CARREL_CHECK(prepared.ok());
    JobControl control = Control();
    control.still = [calls, n = std::make_shared<int>(0)]() -> absl::Status {
      return ++*n <= calls ? absl::OkStatus() : absl::AbortedError("the lease is lost");
    };
    return (*prepared)->Run(control);
  };
  int calls = 0;
  absl::StatusOr<JobResult> result;
  for (;; ++calls) {
    result = run(calls);
    if (result.ok()) break;
    EXPECT_THAT(result, StatusIs(StatusCode::kAborted, "the lease is lost"));
    EXPECT_FALSE(bucket_.ReadName("report").ok());
    ASSERT_LT(calls, 200);
  }
  EXPECT_GT(calls, 3);
  std::cout << calls << " interruptions" << std::endl;
  EXPECT_EQ(bucket_.ReadName("report")->content_id, result->content_id);
}

TEST_F(PrefillRunnerTest, WhatIsKeptOfAJob_GoesWhenItHasEnded) {
  auto runner = NewRunner();
  const JobRecord open = Submit({.name = "open", .model = "demo"}, kText),
                  ended = Submit({.name = "ended", .model = "demo"}, std::string(kText) + " More.");
  for (const JobRecord& job : {open, ended}) {
    const auto prepared = runner->Prepare(job, *board_.ReadDocument(job));
    CARREL_ASSERT_OK(prepared);
    CARREL_ASSERT_OK((*prepared)->Run(Control()));
  }
  CARREL_ASSERT_OK(board_.Cancel(ended.id, ""));
  CARREL_EXPECT_OK(runner->Tidy(board_));
  runner = nullptr;
  const auto names = [&] {
    std::vector<std::string> all;
    const auto store = kvstore::Store::Open(folder_ + "/work", kvstore::StoreMode::kReadWrite);
    CARREL_CHECK(store.ok());
    const auto listed = (*store)->List();
    CARREL_CHECK(listed.ok());
    for (const auto& manifest : *listed) all.push_back(manifest.name());
    return all;
  };
  EXPECT_EQ(names(), std::vector<std::string>{"job-" + open.id});
  runner = NewRunner();
  runner->Forget(open);
  runner->Forget(ended);
  runner = nullptr;
  EXPECT_TRUE(names().empty());
}

}  // namespace
}  // namespace carrel::serving
