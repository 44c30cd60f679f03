// A context into a bucket while it is still being computed: what is visible when, what is sent again, what is refused.
#include "kvstore/remote/push_ahead.h"

#include <atomic>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/remote/pull.h"
#include "kvstore/remote/remote_test_util.h"
#include "kvstore/remote/sweep.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

class PushAheadTest : public testing::Test {
 protected:
  PushAheadTest() {
    auto store = Store::Open(folder_ + "/store", StoreMode::kReadWrite);
    CARREL_CHECK(store.ok());
    store_ = *std::move(store);
    std::filesystem::create_directory(folder_ + "/staging");
    auto files = WriteTestFiles(spec_, id_, folder_ + "/staging");
    CARREL_CHECK(files.ok());
    files_ = *std::move(files);
  }
  // All but the first, which is that of the token ids.
  void AddLayers(PushAhead& ahead) {
    for (size_t i = 1; i < files_.size(); ++i) {
      ahead.Add(id_, static_cast<int64_t>(i), files_[i]);
    }
  }
  void PublishHere() {
    v1::Manifest manifest = TestManifest(spec_, id_);
    CARREL_CHECK(store_->Publish(manifest, files_).ok());
  }
  absl::StatusOr<Pushed> Publish(PushAhead& ahead) {
    ASSIGN_OR_RETURN(const auto from, store_->Export(spec_.name));
    file_bytes_ = 0;
    for (int64_t i = 0; i < from->files(); ++i) file_bytes_ += std::ssize(from->File(i));
    return ahead.Publish("there", *from, [this](int64_t done, int64_t all) {
      EXPECT_LE(done, all);
      told_ = done;
    });
  }
  int Count(const std::string& part) {
    int count = 0;
    for (const auto& [key, bytes] : fake_.Objects()) count += absl::StrContains(key, part) ? 1 : 0;
    return count;
  }
  void AwaitFiles(int count) {
    while (Count(".sst") < count) absl::SleepFor(absl::Milliseconds(2));
  }
  void ExpectThere() {
    auto into = Store::Open(folder_ + "/other", StoreMode::kReadWrite);
    CARREL_CHECK(into.ok());
    const auto stream = BucketStream::Open(bucket_, "there");
    CARREL_ASSERT_OK(stream);
    CARREL_ASSERT_OK(PullContext(**stream, [&](const StreamSourceFn& source) -> absl::Status {
      ASSIGN_OR_RETURN(const auto import, (*into)->Import(spec_.name));
      return ImportFrom(source, *import, [](int64_t, int64_t) {}).status();
    }));
    CARREL_EXPECT_OK(CheckTestContext(**into, spec_));
    EXPECT_EQ((*into)->GetManifest(spec_.name)->content_id(),
              store_->GetManifest(spec_.name)->content_id());
  }

  const std::string folder_ = FreshTempDir();
  const TestContextSpec spec_{.name = "report"};
  const ContextId id_ = ContextId::Random();
  std::unique_ptr<Store> store_;
  std::vector<std::string> files_;
  FakeS3 fake_;
  const Bucket bucket_{TestClient(fake_.endpoint()), "pre/"};
  int64_t told_ = 0;  // of progress, the last time
  int64_t file_bytes_ = -1;
};

TEST_F(PushAheadTest, FilesGoFirst_AndNothingIsVisibleBeforeTheEnd) {
  PushAhead ahead(bucket_);
  AddLayers(ahead);
  AwaitFiles(static_cast<int>(files_.size()) - 1);
  EXPECT_EQ(Count("manifest") + Count("names/"), 0);
  const int64_t put = fake_.bytes_put();
  PublishHere();
  const auto pushed = Publish(ahead);
  CARREL_ASSERT_OK(pushed);
  CARREL_EXPECT_OK(ahead.ahead_status());
  EXPECT_EQ(pushed->sent_bytes, pushed->bytes);
  EXPECT_GT(ahead.sent_ahead(), 0);
  // What went ahead was not sent a second time.
  EXPECT_LT(fake_.bytes_put() - put, pushed->bytes - ahead.sent_ahead() + (1 << 14));
  EXPECT_EQ(told_, file_bytes_);
  ExpectThere();
}

TEST_F(PushAheadTest, GivenUp_LeavesNothingVisible_AndTheNextOneSendsWhatIsMissing) {
  {
    PushAhead ahead(bucket_);
    ahead.Add(id_, 1, files_[1]);
    AwaitFiles(1);
  }
  EXPECT_EQ(Count("manifest") + Count("names/"), 0);
  PushAhead ahead(bucket_);
  AddLayers(ahead);
  PublishHere();
  const auto pushed = Publish(ahead);
  CARREL_ASSERT_OK(pushed);
  EXPECT_LT(pushed->sent_bytes, pushed->bytes);
  EXPECT_GT(pushed->sent_bytes, 0);
  ExpectThere();
}

TEST_F(PushAheadTest, GivenUpForGood_IsSwept) {
  {
    PushAhead ahead(bucket_);
    AddLayers(ahead);
    AwaitFiles(static_cast<int>(files_.size()) - 1);
  }
  fake_.Age(absl::Hours(1));
  CARREL_ASSERT_OK(CollectGarbage(bucket_, {.grace = absl::Minutes(1)}));
  EXPECT_EQ(Count(".sst"), 0);
}

TEST_F(PushAheadTest, WhatFailsOnTheWay_IsSentAtTheEnd) {
  std::atomic<bool> refuses{true};
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    if (refuses && request.method == "PUT" && absl::StrContains(request.key, ".sst")) {
      return FakeReply{.status = 403, .body = "not now"};
    }
    return std::nullopt;
  });
  PushAhead ahead(bucket_);
  AddLayers(ahead);
  // One more than a pusher takes at once: its first failure is met by the next that is added.
  while (ahead.ahead_status().ok() && fake_.requests() < 64) {
    ahead.Add(id_, static_cast<int64_t>(files_.size()) - 1, files_.back());
    absl::SleepFor(absl::Milliseconds(2));
  }
  EXPECT_FALSE(ahead.ahead_status().ok());
  refuses = false;
  PublishHere();
  CARREL_ASSERT_OK(Publish(ahead));
  EXPECT_FALSE(ahead.ahead_status().ok());
  ExpectThere();
  fake_.Intercept(nullptr);
}

TEST_F(PushAheadTest, WithoutAnythingAdded_OrWithAnothersFiles_AllIsSent) {
  PublishHere();
  PushAhead none(bucket_);
  const auto pushed = Publish(none);
  CARREL_ASSERT_OK(pushed);
  EXPECT_EQ(pushed->sent_bytes, pushed->bytes);
  ExpectThere();
  PushAhead other(bucket_);
  const std::string path = folder_ + "/file";
  std::ofstream(path) << "of another context";
  other.Add(ContextId::Random(), 1, path);
  const auto again = Publish(other);
  CARREL_ASSERT_OK(again);
  EXPECT_TRUE(again->was_there);
}

TEST_F(PushAheadTest, AFileOfAnotherSizeThanThatSentAhead_IsDataLoss) {
  PushAhead ahead(bucket_);
  const std::string path = folder_ + "/file";
  std::ofstream(path) << "not the file";
  ahead.Add(id_, 1, path);
  PublishHere();
  EXPECT_THAT(Publish(ahead), StatusIs(StatusCode::kDataLoss, "sent ahead"));
  EXPECT_EQ(Count("manifest") + Count("names/"), 0);
}

TEST_F(PushAheadTest, ADamagedFile_IsDataLossAndNothingIsVisible) {
  PublishHere();
  std::string largest;
  uintmax_t size = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_ + "/store/db")) {
    if (entry.path().extension() != ".sst" || entry.file_size() <= size) continue;
    largest = entry.path();
    size = entry.file_size();
  }
  std::filesystem::permissions(largest, std::filesystem::perms::owner_all);
  std::fstream file(largest, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(size / 3));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(size / 3));
  file.put(static_cast<char>(byte ^ 4));
  file.close();
  PushAhead ahead(bucket_);
  EXPECT_THAT(Publish(ahead), StatusIs(StatusCode::kDataLoss, "push: file"));
  EXPECT_EQ(Count("manifest") + Count("names/"), 0);
}

}  // namespace
}  // namespace carrel::kvstore
