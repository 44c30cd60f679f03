// Documents that become jobs of a bucket of this process, which a worker prefills with the demo model.
#include "serving/job_documents.h"

#include <atomic>
#include <map>

#include "absl/time/clock.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "kvstore/remote/fake_s3.h"
#include "kvstore/remote/remote_test_util.h"
#include "serving/jobs/prefill_runner.h"
#include "serving/jobs/worker.h"
#include "serving/status_details.h"

namespace carrel::serving {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

constexpr char kText[] = "The badge number of Ada is 4711. The badge number of Ben is 1234.";

std::shared_ptr<library::LoadedModel> Demo() {
  static const auto model =
      *library::LoadedModel::Load(SourceFolder() + "/models/demo", "", /*threads=*/2);
  return model;
}

// A store that has what a test puts there.
class Contexts final : public Documents {
 public:
  absl::StatusOr<std::vector<Document>> List() override {
    std::vector<Document> all;
    for (const auto& [name, document] : there) all.push_back(document);
    return all;
  }
  absl::StatusOr<Document> Get(const std::string& name) override {
    if (there.contains(name)) return there[name];
    return absl::NotFoundError(name);
  }
  absl::StatusOr<Added> Add(const std::string&, std::vector<TokenId>, Bringer) override {
    return absl::InternalError("it is not asked");
  }
  absl::StatusOr<std::shared_ptr<void>> TakePlace(const Sees& counted, const Take& take) override {
    int64_t contexts = 0, bytes = 0;
    for (const auto& [name, document] : there) {
      contexts += counted(name) ? 1 : 0;
      bytes += counted(name) ? document.bytes : 0;
    }
    return take(contexts, bytes);
  }
  absl::Status Delete(const std::string&) override { return absl::InternalError("nor this"); }
  absl::Status Watch(const std::string&, Watcher) override { return absl::InternalError("nor"); }
  std::optional<Recognised> Recognise(absl::Span<const TokenId>, int64_t, const Sees&) override {
    return std::nullopt;
  }
  absl::StatusOr<Added> Keep(const std::string&, std::vector<TokenId>, Bringer) override {
    return absl::FailedPreconditionError("nothing is kept");
  }
  int64_t queued() const override { return 0; }

  std::map<std::string, Document> there;
};

class JobDocumentsTest : public testing::Test {
 protected:
  void SetUp() override {
    scheduler_ = Scheduler::Create({}, Demo(), nullptr);
    auto contexts = std::make_unique<Contexts>();
    contexts_ = contexts.get();
    const FollowerConfig quick{.look_every = absl::Milliseconds(10),
                               .tell_every = absl::Milliseconds(5)};
    jobs_ = std::make_shared<JobFollower>(NewBucket(), std::make_unique<QuietDoorbell>(), quick);
    documents_ = MakeJobDocuments({.model_name = "demo", .max_queued = 3}, std::move(contexts),
                                  jobs_, Demo(), scheduler_.get());
    RunnableModel model{.name = "demo", .checkpoint = &Demo()->checkpoint()};
    auto runner =
        PrefillRunner::Create({.folder = folder_ + "/work"}, *bucket_, {model}, Demo()->pool());
    CARREL_ASSERT_OK(runner.status());
    runner_ = *std::move(runner);
    WorkerConfig config;
    config.lease.worker = "w";
    worker_ = std::make_unique<Worker>(board_, *runner_, bell_, config);
  }
  std::unique_ptr<kvstore::Bucket> NewBucket() {
    return std::make_unique<kvstore::Bucket>(kvstore::TestClient(fake_.endpoint()), "");
  }
  static std::vector<TokenId> Tokens(const std::string& text) {
    return *Demo()->checkpoint().EncodeDocument(text);
  }
  absl::StatusOr<Documents::Added> Add(const std::string& name, const std::string& text,
                                       Documents::Bringer by = {}) {
    by.sees = [](const std::string&) { return true; };
    return documents_->Add(name, Tokens(text), std::move(by));
  }
  static bool Until(const std::function<bool()>& done) {
    for (int i = 0; i < 30000; ++i) {
      if (done()) return true;
      absl::SleepFor(absl::Milliseconds(2));
    }
    return false;
  }
  bool IsIn(const std::string& name, DocumentState state) {
    const auto now = documents_->Get(name);
    return now.ok() && now->state == state;
  }

  const std::string folder_ = FreshTempDir();
  kvstore::FakeS3 fake_;
  std::unique_ptr<kvstore::Bucket> bucket_ = NewBucket();
  JobBoard board_{*bucket_};
  QuietDoorbell bell_;
  std::unique_ptr<Scheduler> scheduler_;
  Contexts* contexts_ = nullptr;  // of documents_
  std::shared_ptr<JobFollower> jobs_;
  std::unique_ptr<Documents> documents_;
  std::unique_ptr<PrefillRunner> runner_;
  std::unique_ptr<Worker> worker_;
};

TEST_F(JobDocumentsTest, ADocument_IsAJob_AndThenAContextOfTheBucket) {
  const auto added = Add("report", kText, {.who = "anna", .tenant = "lab"});
  CARREL_ASSERT_OK(added);
  EXPECT_FALSE(added->existed);
  EXPECT_EQ(added->document.state, DocumentState::kQueued);
  EXPECT_EQ(added->document.tokens, static_cast<int64_t>(Tokens(kText).size()));
  EXPECT_EQ(documents_->queued(), 1);
  EXPECT_EQ(documents_->List()->size(), 1u);
  const auto record = jobs_->Find("report")->record;
  EXPECT_EQ(record.owner, "anna");
  EXPECT_EQ(record.tenant, "lab");
  EXPECT_GT(record.expected_bytes, 0);
  EXPECT_TRUE(Add("report", kText)->existed);
  std::atomic<bool> ready{false};
  CARREL_ASSERT_OK(documents_->Watch("report", [&](const Document& now) {
    ready = ready || now.state == DocumentState::kReady;
    return true;
  }));
  EXPECT_TRUE(*worker_->Step());
  EXPECT_TRUE(Until([&] { return ready.load(); }));
  const auto now = documents_->Get("report");
  CARREL_ASSERT_OK(now);
  EXPECT_EQ(now->content_id, bucket_->ReadName("report")->content_id);
  EXPECT_EQ(now->tokens, added->document.tokens);
  EXPECT_TRUE(Add("report", kText)->existed);
  EXPECT_THAT(Add("report", "Another text."),
              StatusIs(StatusCode::kAlreadyExists, "name=report is another document's"));
  // Of a process that never saw the job, and whose store does not have the context yet.
  const auto other = std::make_shared<JobFollower>(NewBucket(), std::make_unique<QuietDoorbell>());
  const auto there = MakeJobDocuments({.model_name = "demo"}, std::make_unique<Contexts>(), other,
                                      Demo(), scheduler_.get());
  EXPECT_EQ(there->Get("report")->content_id, now->content_id);
  EXPECT_THAT(there->Get("none"), StatusIs(StatusCode::kNotFound, "none"));
}

TEST_F(JobDocumentsTest, Delete_CancelsAJob_AndTakesAContextOutOfTheBucket) {
  CARREL_ASSERT_OK(Add("waits", kText));
  absl::Status told;
  absl::Mutex mu;
  CARREL_ASSERT_OK(documents_->Watch("waits", [&](const Document& now) {
    absl::MutexLock lock(&mu);
    told = now.error;
    return true;
  }));
  CARREL_EXPECT_OK(documents_->Delete("waits"));
  EXPECT_TRUE(Until([&] {
    absl::MutexLock lock(&mu);
    return absl::IsCancelled(told);
  }));
  EXPECT_THAT(documents_->Get("waits"), StatusIs(StatusCode::kNotFound, ""));
  EXPECT_FALSE(*worker_->Step());
  CARREL_ASSERT_OK(Add("report", kText));
  EXPECT_TRUE(*worker_->Step());
  CARREL_EXPECT_OK(documents_->Delete("report"));
  EXPECT_FALSE(bucket_->ReadName("report").ok());
  EXPECT_THAT(documents_->Get("report"), StatusIs(StatusCode::kNotFound, ""));
  EXPECT_THAT(documents_->Delete("report"), StatusIs(StatusCode::kNotFound, "report"));
  // And can be brought again.
  CARREL_ASSERT_OK(Add("report", kText));
  EXPECT_TRUE(*worker_->Step());
  EXPECT_TRUE(Until([&] { return IsIn("report", DocumentState::kReady); }));
}

TEST_F(JobDocumentsTest, WhatNoWorkerCanDo_HasFailed_UntilItIsDeleted) {
  CARREL_ASSERT_OK(Add("report", kText));
  const auto record = jobs_->Find("report")->record;
  CARREL_ASSERT_OK(board_.End(record, {.reason = "the disk is full", .tries = 3}));
  CARREL_ASSERT_OK(board_.CleanUp(record, {.reason = "the disk is full", .tries = 3}));
  EXPECT_TRUE(Until([&] { return IsIn("report", DocumentState::kFailed); }));
  EXPECT_THAT(documents_->Get("report")->error,
              StatusIs(StatusCode::kFailedPrecondition, "after 3 tries: the disk is full"));
  CARREL_EXPECT_OK(documents_->Delete("report"));
  EXPECT_THAT(documents_->Get("report"), StatusIs(StatusCode::kNotFound, ""));
}

TEST_F(JobDocumentsTest, Bounds_AreThoseOfEveryDocument) {
  EXPECT_THAT(documents_->Add("a", {}, {}), StatusIs(StatusCode::kInvalidArgument, "empty"));
  EXPECT_THAT(documents_->Add("a", std::vector<TokenId>(1 << 20, 5), {}),
              StatusIs(StatusCode::kInvalidArgument, "max_position_embeddings"));
  EXPECT_THAT(Add("a/b", kText), StatusIs(StatusCode::kInvalidArgument, "a/b"));
  for (int i = 0; i < 3; ++i) CARREL_ASSERT_OK(Add("", absl::StrCat(kText, i)));
  EXPECT_THAT(Add("", "One more."), StatusIs(StatusCode::kResourceExhausted, "3 documents wait"));
  EXPECT_THAT(Add("other", absl::StrCat(kText, 0)), StatusIs(StatusCode::kResourceExhausted, ""));
}

TEST_F(JobDocumentsTest, Quotas_CountOpenJobs_OnceEach) {
  contexts_->there["stored"] = {.name = "stored", .bytes = 1000};
  const auto all = [](const std::string&) { return true; };
  int64_t contexts = 0, bytes = 0;
  const auto look = [&] {
    CARREL_EXPECT_OK(documents_->TakePlace(
        all, [&](int64_t c, int64_t b) -> absl::StatusOr<std::shared_ptr<void>> {
          contexts = c;
          bytes = b;
          return std::shared_ptr<void>();
        }));
  };
  CARREL_ASSERT_OK(Add("held", kText, {.place = std::make_shared<int>(0)}));
  look();
  EXPECT_EQ(contexts, 1) << "its place is counted where it was taken";
  CARREL_ASSERT_OK(Add("elsewhere", "Another text."));
  look();
  EXPECT_EQ(contexts, 2);
  EXPECT_EQ(bytes, 1000 + jobs_->Find("elsewhere")->record.expected_bytes);
}

}  // namespace
}  // namespace carrel::serving
