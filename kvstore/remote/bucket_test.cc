// Contexts into a bucket and out of it, beside others, interrupted and damaged. The bucket is of this process
// (fake_s3.h); tests/bucket_test.cc has whole programs and real servers.
#include "kvstore/remote/bucket.h"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/test_util.h"
#include "kvstore/remote/object_server.h"
#include "kvstore/remote/pull.h"
#include "kvstore/remote/push.h"
#include "kvstore/remote/remote_test_util.h"
#include "kvstore/remote/sweep.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

class BucketTest : public testing::Test {
 protected:
  BucketTest() : store_(NewStore("store")) { Publish(spec_); }

  std::unique_ptr<Store> NewStore(const std::string& name) {
    auto store = Store::Open(folder_ + "/" + name, StoreMode::kReadWrite);
    CARREL_CHECK(store.ok());
    return *std::move(store);
  }
  void Publish(const TestContextSpec& spec) {
    CARREL_CHECK(PublishTestContext(*store_, folder_ + "/staging-" + spec.name, spec).ok());
  }
  std::unique_ptr<Bucket> NewBucket() {
    return std::make_unique<Bucket>(TestClient(fake_.endpoint()), "pre/fix/");
  }
  absl::StatusOr<Pushed> Push(const Bucket& bucket, const std::string& context,
                              const std::string& as = "", PushOptions options = {}) {
    const auto from = store_->Export(context);
    CARREL_CHECK(from.ok());
    return PushContext(
        bucket, **from, as, [](int64_t, int64_t) {}, options);
  }
  absl::Status Pull(const Bucket& bucket, const std::string& name, Store& into,
                    PullOptions options = {}, const std::string& as = "") {
    options.range_bytes = 1000;
    options.tell = [this](const std::string& text) { told_.push_back(text); };
    const auto stream = BucketStream::Open(bucket, name, options);
    RETURN_IF_ERROR(stream.status());
    return PullContext(**stream, [&](const StreamSourceFn& source) -> absl::Status {
      ASSIGN_OR_RETURN(const auto import, into.Import(as));
      return ImportFrom(source, *import, [](int64_t, int64_t) {}).status();
    });
  }
  static int Trials(int usual) {
    const char* given = std::getenv("CARREL_TRIALS");
    return given == nullptr ? usual : std::atoi(given);
  }
  // Contexts c0, c1, .. under one name, all at once: which of them has it.
  int Race(int pushers, const std::function<std::unique_ptr<Bucket>()>& connect) {
    std::atomic<int> won{0}, winner{-1};
    std::vector<std::thread> threads;
    for (int i = 0; i < pushers; ++i) {
      threads.emplace_back([&, i] {
        const auto bucket = connect();
        const auto pushed = Push(*bucket, absl::StrCat("c", i), "race");
        if (!pushed.ok()) {
          EXPECT_THAT(pushed, StatusIs(StatusCode::kAlreadyExists, "bound to content id"));
          return;
        }
        ++won;
        winner = i;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(won, 1);
    return winner;
  }
  std::string FirstKey(const std::string& part) {
    for (const auto& [key, bytes] : fake_.Objects()) {
      if (absl::StrContains(key, part)) return key;
    }
    return "";
  }
  int Count(const std::string& part) {
    int count = 0;
    for (const auto& [key, bytes] : fake_.Objects()) count += absl::StrContains(key, part) ? 1 : 0;
    return count;
  }
  std::string ContentId(const std::string& name) { return store_->GetManifest(name)->content_id(); }

  const std::string folder_ = FreshTempDir();
  const TestContextSpec spec_{.name = "report"};
  FakeS3 fake_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Bucket> bucket_ = NewBucket();
  std::vector<std::string> told_;
};

TEST_F(BucketTest, Context_ComesBackAsItWas) {
  const auto pushed = Push(*bucket_, "report");
  CARREL_ASSERT_OK(pushed);
  EXPECT_EQ(pushed->content_id, ContentId("report"));
  EXPECT_EQ(pushed->sent_bytes, pushed->bytes);
  EXPECT_FALSE(pushed->was_there);
  EXPECT_EQ(Count("pre/fix/"), 3 + 1 + 1) << "files, manifest and name";
  std::vector<absl::Status> unreadable;
  const auto names = bucket_->ListNames(&unreadable);
  CARREL_ASSERT_OK(names);
  EXPECT_EQ(names->at(0).name, "report");
  EXPECT_EQ(names->at(0).tokens, spec_.tokens);
  const auto into = NewStore("other");
  CARREL_ASSERT_OK(Pull(*bucket_, "report", *into));
  CARREL_EXPECT_OK(CheckTestContext(*into, spec_));
  EXPECT_EQ(into->GetManifest("report")->content_id(), ContentId("report"));
  EXPECT_THAT(Pull(*bucket_, "report", *into), StatusIs(StatusCode::kAlreadyExists, "report"));
  const auto third = NewStore("third");
  CARREL_ASSERT_OK(Pull(*bucket_, "report", *third, {.threads = 1, .ahead = 1}, "mine"));
  CARREL_EXPECT_OK(third->GetManifest("mine"));
}

TEST_F(BucketTest, SameContextAgain_IsThereAndNothingIsSent) {
  CARREL_ASSERT_OK(Push(*bucket_, "report"));
  const int64_t put = fake_.bytes_put();
  const auto again = Push(*bucket_, "report");
  CARREL_ASSERT_OK(again);
  EXPECT_TRUE(again->was_there);
  EXPECT_EQ(again->sent_bytes, 0);
  EXPECT_LT(fake_.bytes_put() - put, 5000);
  EXPECT_THAT(Push(*bucket_, "report", "other"),
              StatusIs(StatusCode::kAlreadyExists, "as \"report\", a context has one name"));
  Publish({.name = "second", .seed = 2});
  EXPECT_THAT(Push(*bucket_, "second", "report"),
              StatusIs(StatusCode::kAlreadyExists, "bound to content id " + ContentId("report")));
}

TEST_F(BucketTest, NamesThatAreNotThere_AreNamed) {
  const auto into = NewStore("other");
  EXPECT_THAT(Pull(*bucket_, "none", *into), StatusIs(StatusCode::kNotFound, "\"none\""));
  EXPECT_THAT(RemoveContext(*bucket_, "none"), StatusIs(StatusCode::kNotFound, "\"none\""));
  EXPECT_THAT(bucket_->ReadName("a/b"), StatusIs(StatusCode::kInvalidArgument, "a/b"));
}

TEST_F(BucketTest, Address_OfABucket) {
  EXPECT_EQ(BucketAddress::Parse("s3://b/a/b/")->prefix, "a/b/");
  EXPECT_EQ(BucketAddress::Parse("s3://b")->prefix, "");
  for (const char* bad : {"s3://", "http://b", "s3://b/a//b", "s3://b/../a", "s3://b/a b"}) {
    EXPECT_THAT(BucketAddress::Parse(bad), StatusIs(StatusCode::kInvalidArgument, bad));
  }
}

// Twenty with contexts of their own under one name; and twenty with the same context.
TEST_F(BucketTest, RacesOfTwoAndOfTwentyPushers_HaveOneWinnerAndLeaveNothing) {
  for (int i = 0; i < 20; ++i) {
    Publish({.name = absl::StrCat("c", i), .layers = 1, .tokens = 40, .seed = 100u + i});
  }
  const int rounds = Trials(5);
  for (const int pushers : {2, 20}) {
    for (int round = 0; round < rounds; ++round) {
      const int winner = Race(pushers, [this] { return NewBucket(); });
      const std::string other = absl::StrCat("race", pushers, "-", round);
      const auto into = NewStore(other);
      CARREL_ASSERT_OK(Pull(*bucket_, "race", *into));
      EXPECT_EQ(into->GetManifest("race")->content_id(), ContentId(absl::StrCat("c", winner)));
      CARREL_ASSERT_OK(CollectGarbage(*bucket_, {.grace = absl::ZeroDuration()}));
      fake_.Age(absl::Minutes(1));
      CARREL_ASSERT_OK(CollectGarbage(*bucket_, {.grace = absl::Seconds(5)}));
      EXPECT_EQ(Count("/manifest"), 1);
      EXPECT_EQ(Count(".sst"), 2);
      CARREL_ASSERT_OK(RemoveContext(*bucket_, "race"));
      EXPECT_EQ(fake_.Objects().size(), 0u);
      std::filesystem::remove_all(folder_ + "/" + other);
    }
  }
}

// A real server says who is first; CARREL_TRIALS for more.
TEST_F(BucketTest, OnSeaweed_RacesHaveOneWinner) {
  const std::string folder = folder_ + "/seaweed";
  std::filesystem::create_directory(folder);
  const auto server = ObjectServer::Start(ObjectServer::Kind::kSeaweed, folder);
  if (server == nullptr) GTEST_SKIP() << "this machine has no weed";
  const auto connect = [&] {
    return std::make_unique<Bucket>(TestClient(server->endpoint()), "pre/fix/");
  };
  const auto bucket = connect();
  for (int i = 0; i < 50 && !bucket->client().Put("", "").ok(); ++i) {
    absl::SleepFor(absl::Milliseconds(200));
  }
  for (int i = 0; i < 20; ++i) {
    Publish({.name = absl::StrCat("c", i), .layers = 1, .tokens = 40, .seed = 100u + i});
  }
  const int rounds = Trials(2);
  for (const int pushers : {2, 20}) {
    for (int round = 0; round < rounds; ++round) {
      const int winner = Race(pushers, connect);
      const auto name = bucket->ReadName("race");
      CARREL_ASSERT_OK(name);
      EXPECT_EQ(name->content_id, ContentId(absl::StrCat("c", winner)));
      CARREL_EXPECT_OK(bucket->ReadManifestOf(*name));
      CARREL_ASSERT_OK(RemoveContext(*bucket, "race"));
    }
    std::cout << rounds << " races of " << pushers << std::endl;
  }
}

TEST_F(BucketTest, TwentyWhoPushTheSame_AllSucceed) {
  std::vector<std::thread> threads;
  std::atomic<int> was_there{0};
  for (int i = 0; i < 20; ++i) {
    threads.emplace_back([&] {
      const auto bucket = NewBucket();
      const auto pushed = Push(*bucket, "report");
      CARREL_EXPECT_OK(pushed);
      if (pushed.ok() && pushed->was_there) ++was_there;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(was_there, 19);
  EXPECT_EQ(Count(".sst"), 3);
  EXPECT_EQ(Count("pushes/"), 0);
}

TEST_F(BucketTest, BytesThatAreFlipped_AreRefusedNamedAndFetchedOnceMore) {
  CARREL_ASSERT_OK(Push(*bucket_, "report"));
  const std::string key = FirstKey("/0001-");
  const std::string right = fake_.Objects()[key];
  fake_.Change(key, [](std::string& bytes) { bytes[bytes.size() / 2] ^= 1; });
  const auto into = NewStore("other");
  EXPECT_THAT(
      Pull(*bucket_, "report", *into),
      StatusIs(StatusCode::kDataLoss, "its bytes are not those of its digest, fetched twice"));
  ASSERT_EQ(told_.size(), 1u);
  EXPECT_THAT(told_[0], HasSubstr(key));
  EXPECT_THAT(into->GetManifest("report"), StatusIs(StatusCode::kNotFound, "report"));
  // Right the second time: what was whole is not fetched again.
  auto flips = std::make_shared<std::atomic<int>>(1);
  auto fetched = std::make_shared<std::map<std::string, int64_t>>();
  fake_.Change(key, [&](std::string& bytes) { bytes = right; });
  fake_.Intercept([=](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.method != "GET" || !absl::StrContains(request.key, ".sst")) return std::nullopt;
    if (request.key != key || request.headers.at("range") != "bytes=1000-1999") return std::nullopt;
    if ((*flips)-- <= 0) return std::nullopt;
    std::string bytes = right.substr(1000, 1000);
    bytes[7] ^= 1;
    return FakeReply{
        .status = 206,
        .body = bytes,
        .headers = {{"Content-Range", absl::StrCat("bytes 1000-1999/", right.size())}}};
  });
  told_.clear();
  CARREL_ASSERT_OK(Pull(*bucket_, "report", *into));
  ASSERT_EQ(told_.size(), 1u);
  EXPECT_THAT(told_[0], HasSubstr("fetched once more"));
  CARREL_EXPECT_OK(CheckTestContext(*into, spec_));
}

TEST_F(BucketTest, TruncatedObjects_AreNamed) {
  CARREL_ASSERT_OK(Push(*bucket_, "report"));
  const std::string key = FirstKey("/0002-"), manifest = FirstKey("/manifest"),
                    name = FirstKey("names/");
  const auto objects = fake_.Objects();
  const auto into = NewStore("other");
  for (const size_t size : {size_t{0}, size_t{500}, objects.at(key).size() - 1}) {
    fake_.Change(key, [&](std::string& bytes) { bytes = objects.at(key).substr(0, size); });
    EXPECT_THAT(Pull(*bucket_, "report", *into), StatusIs(StatusCode::kDataLoss, key)) << size;
  }
  fake_.Change(key, [&](std::string& bytes) { bytes = objects.at(key) + "x"; });
  EXPECT_THAT(Pull(*bucket_, "report", *into), StatusIs(StatusCode::kDataLoss, key));
  fake_.Change(key, [&](std::string& bytes) { bytes = objects.at(key); });
  for (size_t at = 0; at < objects.at(manifest).size(); at += 97) {
    fake_.Change(manifest, [&](std::string& bytes) { bytes[at] ^= 4; });
    EXPECT_THAT(Pull(*bucket_, "report", *into).ToString(), HasSubstr("/manifest")) << at;
    fake_.Change(manifest, [&](std::string& bytes) { bytes = objects.at(manifest).substr(0, at); });
    EXPECT_THAT(Pull(*bucket_, "report", *into), StatusIs(StatusCode::kDataLoss, "/manifest"))
        << at;
    fake_.Change(manifest, [&](std::string& bytes) { bytes = objects.at(manifest); });
  }
  fake_.Change(name, [&](std::string& bytes) { bytes = "{}"; });
  EXPECT_THAT(Pull(*bucket_, "report", *into), StatusIs(StatusCode::kDataLoss, "names/report"));
  fake_.Change(name, [&](std::string& bytes) { bytes = objects.at(name); });
  CARREL_EXPECT_OK(Pull(*bucket_, "report", *into));
  CARREL_EXPECT_OK(CheckTestContext(*into, spec_));
}

// The server goes away at some request of a push or a pull: whatever is there then, nothing half is visible,
// the same call goes on, and in the end nothing is left over.
TEST_F(BucketTest, ServerThatGoesAwayAtAnyRequest_LeavesNothingHalf) {
  for (int64_t at = 0;; ++at) {
    auto left = std::make_shared<std::atomic<int64_t>>(at);
    fake_.Intercept([=](const FakeRequest&) -> std::optional<FakeReply> {
      if ((*left)-- > 0) return std::nullopt;
      return FakeReply{.status = 403, .body = "<Error><Code>AccessDenied</Code></Error>"};
    });
    const auto pushed = Push(*bucket_, "report", "", {.threads = 1});
    fake_.Intercept(nullptr);
    const auto into = NewStore(absl::StrCat("other", at));
    const absl::Status pulled = Pull(*bucket_, "report", *into);
    if (pulled.ok()) {
      CARREL_EXPECT_OK(CheckTestContext(*into, spec_));
    } else {
      EXPECT_TRUE(absl::IsNotFound(pulled)) << pulled;
    }
    if (pushed.ok()) {
      CARREL_EXPECT_OK(pulled);
      EXPECT_GT(at, 8);
      if (*left > 0) break;  // it needed no more
    }
    CARREL_ASSERT_OK(Push(*bucket_, "report"));
    CARREL_ASSERT_OK(RemoveContext(*bucket_, "report"));
    // Records of pushes that could not take theirs away.
    fake_.Age(absl::Hours(1));
    CARREL_ASSERT_OK(CollectGarbage(*bucket_, {.grace = absl::Minutes(5)}));
    EXPECT_EQ(fake_.Objects().size(), 0u) << fake_.Objects().begin()->first;
  }
}

TEST_F(BucketTest, InterruptedPush_SendsOnlyWhatIsMissing) {
  auto left = std::make_shared<std::atomic<int>>(2);
  fake_.Intercept([=](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.method != "PUT" || !absl::StrContains(request.key, ".sst")) return std::nullopt;
    if ((*left)-- > 0) return std::nullopt;
    return FakeReply{.status = 403};
  });
  EXPECT_THAT(Push(*bucket_, "report", "", {.threads = 1}),
              StatusIs(StatusCode::kPermissionDenied, "403"));
  fake_.Intercept(nullptr);
  EXPECT_EQ(Count(".sst"), 2);
  EXPECT_EQ(Count("names/") + Count("/manifest"), 0);
  int64_t there = 0;
  for (const auto& [key, bytes] : fake_.Objects()) {
    if (absl::StrContains(key, ".sst")) there += static_cast<int64_t>(bytes.size());
  }
  const auto pushed = Push(*bucket_, "report");
  CARREL_ASSERT_OK(pushed);
  EXPECT_EQ(pushed->sent_bytes, pushed->bytes - there);
}

TEST_F(BucketTest, LargeFile_GoesOnInTheMiddleOfItsParts) {
  const std::string bytes = [] {
    std::string all(13 << 20, '\0');
    for (size_t i = 0; i < all.size(); i += 4096) all[i] = static_cast<char>(i >> 12);
    return all;
  }();
  auto left = std::make_shared<std::atomic<int>>(1);
  fake_.Intercept([=](const FakeRequest& request) -> std::optional<FakeReply> {
    if (!request.query.contains("partNumber") || (*left)-- > 0) return std::nullopt;
    return FakeReply{.status = 403};
  });
  int64_t sent = 0;
  const auto count = [&](int64_t more) { sent += more; };
  EXPECT_THAT(UploadFile(bucket_->client(), "big", bytes, "", count, kLeastPartBytes),
              StatusIs(StatusCode::kPermissionDenied, "403"));
  EXPECT_EQ(sent, kLeastPartBytes);
  fake_.Intercept(nullptr);
  CARREL_ASSERT_OK(UploadFile(bucket_->client(), "big", bytes, "", count, kLeastPartBytes));
  EXPECT_EQ(sent, 13 << 20);
  EXPECT_TRUE(fake_.Objects()["big"] == bytes);
  EXPECT_EQ(fake_.open_uploads(), 0);
  // Twenty at once share what they send.
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      CARREL_EXPECT_OK(UploadFile(
          bucket_->client(), "big2", bytes, "", [](int64_t) {}, kLeastPartBytes));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(fake_.Objects()["big2"] == bytes);
}

TEST_F(BucketTest, Sweep_SparesTheYoungAndWhatIsPushed) {
  CARREL_ASSERT_OK(Push(*bucket_, "report"));
  Publish({.name = "second", .seed = 2});
  const auto from = store_->Export("second");
  const auto id = ContextIdOf((*from)->manifest());
  const std::string bytes(1000, 'x'), sha256 = Sha256Hex(bytes);
  {
    const auto pusher = Pusher::Begin(*bucket_, *id, {.renew_every = absl::Milliseconds(50)});
    CARREL_ASSERT_OK(pusher);
    CARREL_ASSERT_OK((*pusher)->AddFile(0, bytes, sha256, nullptr));
    while (Count(sha256) == 0) absl::SleepFor(absl::Milliseconds(5));
    fake_.Age(absl::Hours(48));
    absl::SleepFor(absl::Milliseconds(200));  // the record is renewed
    const auto swept = CollectGarbage(*bucket_, {.grace = absl::Hours(24)});
    CARREL_ASSERT_OK(swept);
    EXPECT_EQ(swept->pushed, 1);
    EXPECT_EQ(swept->files, 0);
    EXPECT_EQ(Count(sha256), 1);
    EXPECT_EQ(Count("sweeps/"), 0);
  }
  const auto dry = CollectGarbage(*bucket_, {.grace = absl::Hours(24), .dry_run = true});
  CARREL_ASSERT_OK(dry);
  EXPECT_EQ(dry->files, 1);
  EXPECT_EQ(dry->bytes, 1000);
  EXPECT_EQ(Count(sha256), 1);
  EXPECT_EQ(CollectGarbage(*bucket_, {.grace = absl::Hours(72)})->young, 1);
  EXPECT_EQ(CollectGarbage(*bucket_, {.grace = absl::Hours(24)})->files, 1);
  EXPECT_EQ(Count(sha256), 0);
  const auto into = NewStore("other");
  CARREL_EXPECT_OK(Pull(*bucket_, "report", *into));
}

// Nobody can read it any more, but it can be removed; and a name that cannot be read keeps its context.
TEST_F(BucketTest, DamagedManifestOrName_IsRemovedOrKept) {
  CARREL_ASSERT_OK(Push(*bucket_, "report"));
  const std::string manifest = FirstKey("/manifest"), name = FirstKey("names/");
  const std::string right = fake_.Objects()[name];
  fake_.Change(name, [](std::string& bytes) { bytes = "{"; });
  fake_.Age(absl::Hours(48));
  const auto kept = CollectGarbage(*bucket_, {});
  CARREL_ASSERT_OK(kept);
  EXPECT_EQ(kept->files, 0);
  EXPECT_GE(kept->unreadable.size(), 1u);
  EXPECT_EQ(Count(".sst"), 3);
  fake_.Change(name, [&](std::string& bytes) { bytes = right; });
  fake_.Change(manifest, [](std::string& bytes) { bytes[40] ^= 1; });
  CARREL_EXPECT_OK(CollectGarbage(*bucket_, {}));
  EXPECT_EQ(Count(".sst"), 3);
  CARREL_ASSERT_OK(RemoveContext(*bucket_, "report"));
  EXPECT_EQ(fake_.Objects().size(), 0u);
}

// A push that begins while the context is swept waits; one that died in the middle is taken over.
TEST_F(BucketTest, PushBesideASweep_WaitsAndSendsAll) {
  const auto id = ContextIdOf(*store_->GetManifest("report"));
  auto mark = SweepMark::Take(*bucket_, id->ToString(), absl::ZeroDuration());
  CARREL_ASSERT_OK(mark);
  ASSERT_NE(*mark, nullptr);
  EXPECT_EQ(*SweepMark::Take(*bucket_, id->ToString(), absl::ZeroDuration()), nullptr);
  std::atomic<bool> pushed{false};
  std::thread pusher([&] {
    const auto bucket = NewBucket();
    CARREL_EXPECT_OK(Push(*bucket, "report"));
    pushed = true;
  });
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_FALSE(pushed);
  EXPECT_EQ(Count(".sst"), 0);
  *mark = nullptr;
  pusher.join();
  EXPECT_EQ(Count(".sst"), 3);
  // Of a sweeper that was killed, long ago.
  CARREL_ASSERT_OK(RemoveContext(*bucket_, "report"));
  CARREL_ASSERT_OK(bucket_->client().Put(bucket_->SweepKey(id->ToString()), "x"));
  fake_.Age(kSweepLease + absl::Minutes(1));
  CARREL_EXPECT_OK(Push(*bucket_, "report"));
}

// Pushes, removals and sweeps at once: what a name shows is whole, always, and nothing is left in the end.
TEST_F(BucketTest, PushesRemovalsAndSweepsAtOnce_ShowOnlyWholeContexts) {
  std::atomic<bool> over{false};
  std::atomic<int> pulls{0}, pushes{0}, removals{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      const auto bucket = NewBucket();
      while (!over) {
        const auto pushed = Push(*bucket, "report");
        EXPECT_TRUE(pushed.ok() || absl::IsAborted(pushed.status())) << pushed.status();
        if (pushed.ok()) ++pushes;
      }
    });
  }
  threads.emplace_back([&] {
    const auto bucket = NewBucket();
    while (!over) {
      const auto removed = RemoveContext(*bucket, "report");
      EXPECT_TRUE(removed.ok() || absl::IsNotFound(removed.status()) ||
                  absl::IsAborted(removed.status()))
          << removed.status();
      if (removed.ok()) ++removals;
    }
  });
  threads.emplace_back([&] {
    const auto bucket = NewBucket();
    while (!over) CARREL_EXPECT_OK(CollectGarbage(*bucket, {.grace = absl::ZeroDuration()}));
  });
  for (int i = 0; i < 60; ++i) {
    const auto into = NewStore(absl::StrCat("other", i));
    const absl::Status pulled = Pull(*bucket_, "report", *into);
    EXPECT_TRUE(pulled.ok() || absl::IsNotFound(pulled)) << pulled;
    if (pulled.ok()) {
      ++pulls;
      CARREL_EXPECT_OK(CheckTestContext(*into, spec_));
    }
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(pushes, 0);
  EXPECT_GT(removals, 0);
  RecordProperty("pulls", pulls.load());
  CARREL_ASSERT_OK(Push(*bucket_, "report"));
  const auto into = NewStore("last");
  CARREL_ASSERT_OK(Pull(*bucket_, "report", *into));
  CARREL_ASSERT_OK(RemoveContext(*bucket_, "report"));
  fake_.Age(absl::Hours(1));
  CARREL_ASSERT_OK(CollectGarbage(*bucket_, {.grace = absl::Minutes(1)}));
  EXPECT_EQ(fake_.Objects().size(), 0u);
}

}  // namespace
}  // namespace carrel::kvstore
