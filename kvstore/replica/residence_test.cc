// Contexts of a bucket of this process (kvstore/remote/fake_s3.h), brought into a store and let go again.
#include "kvstore/replica/residence.h"

#include <atomic>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/remote/push.h"
#include "kvstore/remote/remote_test_util.h"
#include "kvstore/remote/sweep.h"
#include "kvstore/replica/residence_test_util.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

class ResidenceTest : public testing::Test {
 protected:
  ResidenceTest() : source_(NewStore("source")), here_(NewStore("here")) {
    config_.pull.range_bytes = 1000;
    config_.look_every = absl::Hours(1);  // tests look themselves
    config_.keep_unopened = absl::ZeroDuration();
  }

  std::unique_ptr<Store> NewStore(const std::string& name) {
    auto store = Store::Open(folder_ + "/" + name, StoreMode::kReadWrite);
    CARREL_CHECK(store.ok());
    return *std::move(store);
  }
  std::unique_ptr<Bucket> NewBucket() {
    return std::make_unique<Bucket>(TestClient(fake_.endpoint()), "");
  }
  // A context into the bucket; its bytes there.
  int64_t Add(const std::string& name, uint64_t seed) {
    TestContextSpec spec{.name = name, .seed = seed};
    CARREL_CHECK(
        PublishTestContext(*source_, absl::StrCat(folder_, "/staging-", name, seed), spec).ok());
    const auto from = source_->Export(name);
    CARREL_CHECK(from.ok());
    const auto bucket = NewBucket();
    const auto pushed = PushContext(*bucket, **from, name, [](int64_t, int64_t) {});
    CARREL_CHECK(pushed.ok());
    CARREL_CHECK(source_->Delete(name).ok());
    return pushed->bytes;
  }
  ResidenceTarget Target() {
    return {.list = [this]() -> absl::StatusOr<std::vector<LyingHere>> {
              std::vector<LyingHere> lying;
              for (const std::string& name : Here()) {
                lying.push_back({name, here_->GetManifest(name)->content_id(),
                                 (*here_->Export(name))->bytes()});
              }
              return lying;
            },
            .remove = [this](const std::string& name) -> absl::Status {
              if (on_remove_) on_remove_(name);
              if (IsOpen(name)) return absl::FailedPreconditionError("open");
              return here_->Delete(name);
            },
            .is_open = [this](const std::string& name) { return IsOpen(name); },
            .import = [this](const std::string& name) { return here_->Import(name); },
            .describe = [this](const std::string& name) { return here_->GetManifest(name); }};
  }
  void Start(int64_t cache_bytes) {
    config_.cache_bytes = cache_bytes;
    auto residence = Residence::Create(config_, NewBucket(), NewBucket(), Target());
    CARREL_CHECK(residence.ok());
    residence_ = *std::move(residence);
    CARREL_ASSERT_OK(residence_->Look());
  }
  bool IsOpen(const std::string& name) {
    absl::MutexLock lock(&mu_);
    return open_.count(name) > 0;
  }
  void SetOpen(const std::string& name, bool open) {
    absl::MutexLock lock(&mu_);
    if (open) {
      open_.insert(name);
    } else {
      open_.erase(name);
    }
  }
  std::set<std::string> Here() {
    std::set<std::string> names;
    const auto here = here_->List();
    CARREL_CHECK(here.ok());
    for (const v1::Manifest& manifest : *here) names.insert(manifest.name());
    return names;
  }

  const std::string folder_ = FreshTempDir();
  FakeS3 fake_;
  std::unique_ptr<Store> source_, here_;
  ResidenceConfig config_;
  absl::Mutex mu_;
  std::set<std::string> open_ ABSL_GUARDED_BY(mu_);
  std::function<void(const std::string&)> on_remove_;  // before it is removed; set before Start
  std::unique_ptr<Residence> residence_;
};

TEST_F(ResidenceTest, HoweverManyAsk_ItIsBroughtOnce) {
  Add("report", 1);
  std::map<std::string, int> gets;  // of files, by key and range
  absl::Mutex gets_mu;
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.method == "GET" && absl::StrContains(request.key, ".sst")) {
      const auto range = request.headers.find("range");
      absl::MutexLock lock(&gets_mu);
      ++gets[request.key + (range == request.headers.end() ? "" : range->second)];
    }
    return std::nullopt;
  });
  Start(1 << 20);
  constexpr int kAsk = 64;
  std::atomic<int> told{0}, done{0};
  absl::Notification all;
  std::vector<std::shared_ptr<void>> handles(kAsk);
  std::vector<std::thread> threads;
  for (int i = 0; i < kAsk; ++i) {
    threads.emplace_back([&, i] {
      handles[i] = residence_->Bring(
          "report",
          {.progress = [&](const ContextComes& c) { told += c.bytes <= c.of && c.of > 0; },
           .done =
               [&](const absl::Status& status) {
                 CARREL_EXPECT_OK(status);
                 if (++done == kAsk) all.Notify();
               }});
    });
  }
  for (std::thread& thread : threads) thread.join();
  all.WaitForNotification();
  EXPECT_GT(told, 0);
  for (const auto& [key, times] : gets) EXPECT_EQ(times, 1) << key;
  CARREL_EXPECT_OK(CheckTestContext(*here_, {.name = "report", .seed = 1}));
  const ResidenceStatistics statistics = residence_->Statistics();
  EXPECT_EQ(statistics.pulls, 1);
  EXPECT_EQ(statistics.waiting, 0);
  EXPECT_EQ(statistics.contexts, 1);
  // From now on without the bucket.
  const int64_t requests = fake_.requests();
  CARREL_EXPECT_OK(BringAndWait(*residence_, "report"));
  EXPECT_EQ(fake_.requests(), requests);
  fake_.Intercept(nullptr);
}

TEST_F(ResidenceTest, WithoutRoom_WhatWasOpenedLongestAgoGoes) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  Add("c", 3);
  Start(2 * bytes + bytes / 2);
  config_.keep_unopened = absl::ZeroDuration();
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  CARREL_ASSERT_OK(BringAndWait(*residence_, "b"));
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));  // b is the older now
  CARREL_ASSERT_OK(BringAndWait(*residence_, "c"));
  EXPECT_EQ(Here(), (std::set<std::string>{"a", "c"}));
  EXPECT_EQ(residence_->Statistics().evictions, 1);
  CARREL_EXPECT_OK(BringAndWait(*residence_, "b"));
  EXPECT_EQ(Here(), (std::set<std::string>{"b", "c"}));
}

// Many more contexts are asked for than have room: each goes as soon as its answer is over.
TEST_F(ResidenceTest, WhatWasOpened_GoesAsSoonAsItIsClosed) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  config_.keep_unopened = absl::Hours(1);
  Start(bytes + bytes / 2);
  for (const char* name : {"a", "b", "a"}) {
    absl::Notification brought;
    const auto handle = residence_->Bring(name, {.done = [&](const absl::Status& status) {
                                            CARREL_EXPECT_OK(status);
                                            brought.Notify();
                                          }});
    ASSERT_TRUE(brought.WaitForNotificationWithTimeout(absl::Seconds(60))) << name;
    EXPECT_EQ(Here(), (std::set<std::string>{name}));
  }
}

TEST_F(ResidenceTest, WhatIsOpenedLater_StaysUntilSomebodyOpensIt) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  config_.keep_unopened = absl::Hours(1);
  Start(bytes + bytes / 2);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  absl::Notification waits, brought;
  std::atomic<bool> told{false};
  const auto handle =
      residence_->Bring("b", {.progress =
                                  [&](const ContextComes& comes) {
                                    if (comes.waits_for_room && !told.exchange(true))
                                      waits.Notify();
                                  },
                              .done =
                                  [&](const absl::Status& status) {
                                    CARREL_EXPECT_OK(status);
                                    brought.Notify();
                                  }});
  waits.WaitForNotification();
  EXPECT_FALSE(brought.HasBeenNotified());
  residence_->Bring("a", {.done = [](const absl::Status& status) { CARREL_EXPECT_OK(status); }});
  ASSERT_TRUE(brought.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_EQ(Here(), (std::set<std::string>{"b"}));
}

// Between the choice of who goes and its end, somebody asks for it: it is not told that it is here, and comes again.
TEST_F(ResidenceTest, WhatIsGoing_ComesAgainForWhoAsksMeanwhile) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  absl::Notification going, goes;
  on_remove_ = [&](const std::string& name) {
    if (name != "a" || going.HasBeenNotified()) return;
    going.Notify();
    goes.WaitForNotification();
  };
  Start(bytes + bytes / 2);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  absl::Notification b_came, a_came;
  auto b = residence_->Bring("b", {.done = [&](const absl::Status& status) {
                               CARREL_EXPECT_OK(status);
                               b_came.Notify();
                             }});
  going.WaitForNotification();
  EXPECT_FALSE(residence_->IsHere("a"));
  const auto a = residence_->Bring("a", {.done = [&](const absl::Status& status) {
                                     CARREL_EXPECT_OK(status);
                                     EXPECT_EQ(Here(), (std::set<std::string>{"a"}));
                                     a_came.Notify();
                                   }});
  EXPECT_FALSE(a_came.HasBeenNotified());
  goes.Notify();
  b_came.WaitForNotification();
  b.reset();
  a_came.WaitForNotification();
  EXPECT_EQ(residence_->Statistics().pulls, 3);
}

// The same, where it could not be removed after all: it is still here, and is not brought twice.
TEST_F(ResidenceTest, WhatCouldNotGo_IsHereForWhoAskedMeanwhile) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  absl::Notification going, goes;
  on_remove_ = [&](const std::string& name) {
    if (name != "a" || going.HasBeenNotified()) return;
    going.Notify();
    goes.WaitForNotification();
  };
  Start(bytes + bytes / 2);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  absl::Notification a_came;
  auto b = residence_->Bring("b", {.done = [](const absl::Status&) {}});
  going.WaitForNotification();
  SetOpen("a", true);
  const auto a = residence_->Bring("a", {.done = [&](const absl::Status& status) {
                                     CARREL_EXPECT_OK(status);
                                     a_came.Notify();
                                   }});
  goes.Notify();
  a_came.WaitForNotification();
  EXPECT_EQ(Here(), (std::set<std::string>{"a"}));
  EXPECT_EQ(residence_->Statistics().pulls, 1);
}

TEST_F(ResidenceTest, WhatIsOpenStays_AndAPullWaitsForRoom) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  Start(bytes + bytes / 2);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  SetOpen("a", true);
  std::atomic<bool> done{false};
  absl::Notification brought;
  const auto handle = residence_->Bring("b", {.done = [&](const absl::Status& status) {
                                          CARREL_EXPECT_OK(status);
                                          done = true;
                                          brought.Notify();
                                        }});
  absl::SleepFor(absl::Milliseconds(500));
  EXPECT_FALSE(done);
  EXPECT_EQ(Here(), (std::set<std::string>{"a"}));
  SetOpen("a", false);
  brought.WaitForNotification();
  EXPECT_EQ(Here(), (std::set<std::string>{"b"}));
}

TEST_F(ResidenceTest, WhoWaitsForRoom_IsToldSo) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  Start(bytes + bytes / 2);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  SetOpen("a", true);
  absl::Notification waits, brought;
  std::atomic<bool> told{false};
  const auto handle =
      residence_->Bring("b", {.progress =
                                  [&](const ContextComes& comes) {
                                    if (comes.waits_for_room && !told.exchange(true))
                                      waits.Notify();
                                  },
                              .done =
                                  [&](const absl::Status& status) {
                                    CARREL_EXPECT_OK(status);
                                    brought.Notify();
                                  }});
  waits.WaitForNotification();
  EXPECT_FALSE(brought.HasBeenNotified());
  SetOpen("a", false);
  brought.WaitForNotification();
}

// Between "it is here" and the engine's opening it, however long that takes.
TEST_F(ResidenceTest, WhatSomebodyHoldsStays_AlsoBeforeItIsOpen) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  Start(bytes + bytes / 2);
  std::vector<std::shared_ptr<void>> handles;
  for (int i = 0; i < 2; ++i) {  // the first waits for the pull, the second finds it here
    absl::Notification here;
    handles.push_back(
        residence_->Bring("a", {.progress = nullptr, .done = [&](absl::Status status) {
                                  CARREL_EXPECT_OK(status);
                                  here.Notify();
                                }}));
    here.WaitForNotification();
  }
  absl::Notification brought;
  const auto other =
      residence_->Bring("b", {.progress = nullptr, .done = [&](const absl::Status& status) {
                                CARREL_EXPECT_OK(status);
                                brought.Notify();
                              }});
  for (auto& handle : handles) {
    absl::SleepFor(absl::Milliseconds(400));
    EXPECT_FALSE(brought.HasBeenNotified());
    EXPECT_EQ(Here(), (std::set<std::string>{"a"}));
    handle.reset();
  }
  brought.WaitForNotification();
  EXPECT_EQ(Here(), (std::set<std::string>{"b"}));
}

TEST_F(ResidenceTest, Contexts_AreThoseOfTheBucket_HereOrNot) {
  Add("a", 1);
  Add("b", 2);
  Start(1 << 20);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "b"));
  const std::vector<SourceContext> all = residence_->Contexts();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].name, "a");
  EXPECT_FALSE(all[0].here);
  EXPECT_EQ(all[1].name, "b");
  EXPECT_TRUE(all[1].here);
  for (const SourceContext& one : all) {
    EXPECT_GT(one.bytes, 0);
    EXPECT_EQ(one.tokens, TestContextSpec().tokens);
    const auto described = residence_->Describe(one.name);
    CARREL_ASSERT_OK(described);
    EXPECT_EQ(described->content_id(), one.content_id);
    EXPECT_EQ(described->name(), one.name);
  }
  EXPECT_EQ(Here(), (std::set<std::string>{"b"})) << "describing brings nothing";
  EXPECT_THAT(residence_->Describe("nobody"), StatusIs(StatusCode::kNotFound, "nobody"));
}

TEST_F(ResidenceTest, ALookAtNamesThatDidNotChange_ReadsNoneOfThem) {
  Add("a", 1);
  Add("b", 2);
  Start(1 << 20);
  std::atomic<int> reads{0};
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    reads += request.method == "GET" && absl::StrContains(request.key, "names/") ? 1 : 0;
    return std::nullopt;
  });
  CARREL_ASSERT_OK(residence_->Look());
  EXPECT_EQ(reads, 0);
  Add("c", 3);
  reads = 0;
  CARREL_ASSERT_OK(residence_->Look());
  EXPECT_EQ(reads, 1);
  EXPECT_EQ(residence_->Contexts().size(), 3u);
  fake_.Intercept(nullptr);
}

TEST_F(ResidenceTest, End_TellsWhoWaits) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  Start(bytes + bytes / 2);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  SetOpen("a", true);
  absl::Notification ended;
  const auto handle =
      residence_->Bring("b", {.progress = nullptr, .done = [&](const absl::Status& status) {
                                EXPECT_THAT(status, StatusIs(StatusCode::kCancelled, "ends"));
                                ended.Notify();
                              }});
  residence_->End();
  ended.WaitForNotification();
  EXPECT_THAT(BringAndWait(*residence_, "b"), StatusIs(StatusCode::kCancelled, "ends"));
  EXPECT_EQ(residence_->Statistics().waiting, 0);
}

TEST_F(ResidenceTest, NobodyWaitsAnyMore_ThePullIsGivenUp) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  Start(bytes + bytes / 2);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  SetOpen("a", true);
  auto handle = residence_->Bring("b", {.done = [](const absl::Status&) {
                                    ADD_FAILURE() << "told after its handle was dropped";
                                  }});
  handle.reset();
  while (residence_->Statistics().pulling + residence_->Statistics().queued > 0) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(residence_->Statistics().waiting, 0);
  EXPECT_EQ(Here(), (std::set<std::string>{"a"}));
}

TEST_F(ResidenceTest, LargerThanTheCache_IsRefused) {
  const int64_t bytes = Add("a", 1);
  Start(bytes - 1);
  EXPECT_THAT(BringAndWait(*residence_, "a"),
              StatusIs(StatusCode::kResourceExhausted, absl::StrCat(bytes, " bytes are more")));
  EXPECT_THAT(BringAndWait(*residence_, "a"),
              StatusIs(StatusCode::kResourceExhausted, absl::StrCat(bytes - 1)));
}

TEST_F(ResidenceTest, NoSuchName_IsNotFound) {
  Start(1 << 20);
  EXPECT_THAT(BringAndWait(*residence_, "nobody"), StatusIs(StatusCode::kNotFound, "nobody"));
}

TEST_F(ResidenceTest, TheBucketIsGone_WhatIsHereAnswersAndOthersSaySo) {
  Add("a", 1);
  Add("b", 2);
  config_.pull.threads = 1;
  Start(1 << 20);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  fake_.Intercept([](const FakeRequest&) { return FakeReply{.status = 400, .body = "gone"}; });
  CARREL_EXPECT_OK(BringAndWait(*residence_, "a"));
  EXPECT_FALSE(BringAndWait(*residence_, "b").ok());
  EXPECT_FALSE(residence_->Look().ok());
  EXPECT_EQ(Here(), (std::set<std::string>{"a"}));
  fake_.Intercept(nullptr);
  CARREL_EXPECT_OK(BringAndWait(*residence_, "b"));
}

// However many contexts are waited for: who is behind others does not wait for each of them to fail.
TEST_F(ResidenceTest, TheBucketSaysNothing_AllWhoWaitAreToldTogether) {
  std::atomic<bool> holds{true};
  std::atomic<int> names{0};
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    if (!absl::StrContains(request.key, "names/")) return std::nullopt;
    ++names;
    while (holds) absl::SleepFor(absl::Milliseconds(2));
    return FakeReply{.status = 503, .body = "<Error><Code>SlowDown</Code></Error>"};
  });
  config_.cache_bytes = 1 << 20;
  config_.pulls = 1;
  S3Config soon = TestConfig(fake_.endpoint());
  soon.retry.attempts = 1;
  const auto bucket = [&] {
    return std::make_unique<Bucket>(*S3Client::Create(soon, GivenCredentials(kTestCredentials)),
                                    "");
  };
  residence_ = *Residence::Create(config_, bucket(), bucket(), Target());
  constexpr int kAsk = 20;
  std::atomic<int> told{0};
  absl::Notification all;
  std::vector<std::shared_ptr<void>> handles;
  for (int i = 0; i < kAsk; ++i) {
    handles.push_back(residence_->Bring(
        absl::StrCat("c", i), {.progress = nullptr, .done = [&](const absl::Status& status) {
                                 EXPECT_TRUE(absl::IsUnavailable(status)) << status;
                                 if (++told == kAsk) all.Notify();
                               }}));
  }
  while (names == 0) absl::SleepFor(absl::Milliseconds(2));
  holds = false;
  all.WaitForNotification();
  EXPECT_EQ(names, 1);
  EXPECT_EQ(residence_->Statistics().waiting, 0);
  residence_.reset();
  fake_.Intercept(nullptr);
}

TEST_F(ResidenceTest, WhatLeftTheBucketGoes_AndItsNameIsAnothers) {
  Add("a", 1);
  Start(1 << 20);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  SetOpen("a", true);
  const auto bucket = NewBucket();
  CARREL_ASSERT_OK(RemoveContext(*bucket, "a").status());
  CARREL_ASSERT_OK(residence_->Look());
  EXPECT_EQ(Here(), (std::set<std::string>{"a"}));  // who has it open reads on
  EXPECT_FALSE(residence_->IsHere("a"));
  EXPECT_THAT(BringAndWait(*residence_, "a"),
              StatusIs(StatusCode::kUnavailable, "still open here"));
  SetOpen("a", false);
  CARREL_ASSERT_OK(residence_->Look());
  EXPECT_EQ(Here(), std::set<std::string>());
  EXPECT_THAT(BringAndWait(*residence_, "a"), StatusIs(StatusCode::kNotFound, "a"));
  Add("a", 7);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  CARREL_EXPECT_OK(CheckTestContext(*here_, {.name = "a", .seed = 7}));
}

TEST_F(ResidenceTest, AnotherOneOfTheName_TakesThePlaceOfTheFirst) {
  Add("a", 1);
  Start(1 << 20);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  const auto bucket = NewBucket();
  CARREL_ASSERT_OK(RemoveContext(*bucket, "a").status());
  Add("a", 5);
  CARREL_ASSERT_OK(residence_->Look());
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  CARREL_EXPECT_OK(CheckTestContext(*here_, {.name = "a", .seed = 5}));
}

TEST_F(ResidenceTest, AnInterruptedPull_GoesOnWhereItWas) {
  Add("report", 1);
  std::atomic<int> files{0};
  std::atomic<bool> fails{true};
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.method != "GET" || !absl::StrContains(request.key, ".sst")) return std::nullopt;
    if (fails && ++files > 3) return FakeReply{.status = 403, .body = "no more"};
    return std::nullopt;
  });
  config_.pull.threads = 1;
  Start(1 << 20);
  EXPECT_FALSE(BringAndWait(*residence_, "report").ok());
  EXPECT_EQ(Here(), std::set<std::string>());
  EXPECT_EQ(residence_->Statistics().bytes, 0);
  fails = false;
  CARREL_ASSERT_OK(BringAndWait(*residence_, "report"));
  CARREL_EXPECT_OK(CheckTestContext(*here_, {.name = "report", .seed = 1}));
  fake_.Intercept(nullptr);
}

// What was brought before counts.
TEST_F(ResidenceTest, StartedAgain_KnowsWhatIsHere) {
  const int64_t bytes = Add("a", 1);
  Add("b", 2);
  Start(2 * bytes + 1000);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "a"));
  residence_.reset();
  Start(2 * bytes + 1000);
  EXPECT_TRUE(residence_->IsHere("a"));
  EXPECT_GE(residence_->Statistics().bytes, bytes);
  CARREL_ASSERT_OK(BringAndWait(*residence_, "b"));
  EXPECT_EQ(Here(), (std::set<std::string>{"a", "b"}));
}

TEST_F(ResidenceTest, ACacheFolder_IsOfOneBucketAndOfNothingElse) {
  const std::string here = folder_ + "/here";
  CARREL_EXPECT_OK(ClaimCacheFolder(here, "s3://a/b", *here_));
  CARREL_EXPECT_OK(ClaimCacheFolder(here, "s3://a/b", *here_));
  EXPECT_THAT(ClaimCacheFolder(here, "s3://a/c", *here_),
              StatusIs(StatusCode::kFailedPrecondition, "of s3://a/b, not of s3://a/c"));
  CARREL_ASSERT_OK(PublishTestContext(*source_, folder_ + "/staging", {.name = "mine"}).status());
  EXPECT_THAT(ClaimCacheFolder(folder_ + "/source", "s3://a/b", *source_),
              StatusIs(StatusCode::kFailedPrecondition, "contexts of its own"));
}

TEST_F(ResidenceTest, ValuesThatMakeNoSense_AreRefused) {
  config_.cache_bytes = 0;
  EXPECT_THAT(Residence::Create(config_, NewBucket(), NewBucket(), Target()),
              StatusIs(StatusCode::kInvalidArgument, "cache_bytes=0"));
  config_.cache_bytes = 1;
  config_.pulls = 0;
  EXPECT_THAT(Residence::Create(config_, NewBucket(), NewBucket(), Target()),
              StatusIs(StatusCode::kInvalidArgument, "pulls=0"));
}

}  // namespace
}  // namespace carrel::kvstore
