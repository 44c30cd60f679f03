// Contexts that are to be here: Warm and Locate of a server, health that waits for them.
#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/remote/push.h"
#include "kvstore/remote/remote_test_util.h"
#include "kvstore/replica/residence.h"
#include "kvstore/replica/warming.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/server.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

class WarmTest : public testing::Test {
 protected:
  WarmTest() {
    for (const char* name : {"a", "b"}) Add(name);
    Start(int64_t{1} << 30, {});
  }
  ~WarmTest() override { fake_.Intercept(nullptr); }

  void Add(const std::string& name) {
    auto source = Store::Open(folder_ + "/source-" + name, StoreMode::kReadWrite);
    CARREL_CHECK(source.ok());
    CARREL_CHECK(PublishTestContext(**source, folder_ + "/staging-" + name, {.name = name}).ok());
    const auto from = (*source)->Export(name);
    CARREL_CHECK(from.ok());
    const Bucket bucket(TestClient(fake_.endpoint()), "");
    const auto pushed = PushContext(bucket, **from, name, [](int64_t, int64_t) {});
    CARREL_CHECK(pushed.ok());
    bytes_ = pushed->bytes;
  }
  // warm: what is to be here before it is ready.
  void Start(int64_t cache_bytes, const std::vector<std::string>& warm) {
    warming_ = nullptr;
    server_ = nullptr;
    residence_ = nullptr;
    engine_ = nullptr;
    auto here = Store::Open(absl::StrCat(folder_, "/here", ++started_), StoreMode::kReadWrite);
    CARREL_CHECK(here.ok());
    engine_ = *Engine::Create({.search_threads = 2}, *std::move(here));
    ResidenceConfig config;
    config.cache_bytes = cache_bytes;
    residence_ = *Residence::Create(
        config, std::make_unique<Bucket>(TestClient(fake_.endpoint()), ""),
        std::make_unique<Bucket>(TestClient(fake_.endpoint()), ""), TargetOf(*engine_));
    ServerConfig server;
    server.listen.clear();
    server.source = residence_.get();
    server.advertise = "replica-3.carrel:50051";
    server.ready_later = !warm.empty();
    server_ = *Server::Start(server, engine_.get());
    channel_ = server_->InProcessChannel();
    client_ = std::make_unique<ContextClient>(channel_, "replica", absl::Seconds(30));
    if (warm.empty()) return;
    warming_ = std::make_unique<Warming>(
        *residence_, warm, [this] { server_->SetReady(); }, absl::Milliseconds(20));
  }
  // While it is held, no file of a context comes.
  void Hold() {
    fake_.Intercept([this](const FakeRequest& request) -> std::optional<FakeReply> {
      while (holds_ && absl::StrContains(request.key, ".sst"))
        absl::SleepFor(absl::Milliseconds(2));
      return std::nullopt;
    });
  }
  std::string Health() { return HealthOf(channel_, ""); }

  const std::string folder_ = FreshTempDir();
  FakeS3 fake_;
  int64_t bytes_ = 0;
  int started_ = 0;
  std::atomic<bool> holds_{true};
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Residence> residence_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<ContextClient> client_;
  std::unique_ptr<Warming> warming_;
};

TEST_F(WarmTest, Warm_WaitsUntilItIsHere_AndTellsHowFarItIs) {
  Hold();
  std::atomic<int> told{0};
  std::thread waits([&] {
    CARREL_EXPECT_OK(client_->Warm("a", [&](const v1::WarmReply& reply) {
      EXPECT_LE(reply.bytes(), reply.of());
      ++told;
      return true;
    }));
  });
  while (told == 0) absl::SleepFor(absl::Milliseconds(2));
  EXPECT_FALSE(residence_->IsHere("a"));
  holds_ = false;
  waits.join();
  EXPECT_TRUE(residence_->IsHere("a"));
  EXPECT_GE(told, 2);
  // Once more: at once, with one reply.
  told = 0;
  CARREL_EXPECT_OK(client_->Warm("a", [&](const v1::WarmReply& reply) {
    EXPECT_TRUE(reply.here());
    ++told;
    return true;
  }));
  EXPECT_EQ(told, 1);
}

TEST_F(WarmTest, Warm_OfWhatIsNot_OrIsLeft) {
  const auto on = [](const v1::WarmReply&) { return true; };
  EXPECT_THAT(client_->Warm("nobody", on), StatusIs(StatusCode::kNotFound, "nobody"));
  EXPECT_THAT(client_->Warm("a/b", on), StatusIs(StatusCode::kNotFound, "a/b"));
  Hold();
  EXPECT_THAT(client_->Warm("b", [](const v1::WarmReply& reply) { return reply.here(); }),
              StatusIs(StatusCode::kCancelled, "b"));
  holds_ = false;
}

TEST_F(WarmTest, WhatIsElsewhere_IsListedDescribedAndReadWithoutBeingOpened) {
  v1::ListResponse listed;
  while (listed.contexts_size() < 2) {  // the first look may still be on its way
    absl::StatusOr<v1::ListResponse> now = client_->List();
    CARREL_ASSERT_OK(now);
    listed = *std::move(now);
    absl::SleepFor(absl::Milliseconds(5));
  }
  for (const auto& context : listed.contexts()) {
    EXPECT_TRUE(context.elsewhere()) << context.name();
    EXPECT_EQ(context.tokens(), TestContextSpec().tokens);
  }
  const auto described = client_->Get("a");
  CARREL_ASSERT_OK(described);
  EXPECT_EQ(described->tokens(), TestContextSpec().tokens);
  EXPECT_FALSE(residence_->IsHere("a"));
  // They are made up: the client holds them against the manifest.
  EXPECT_THAT(client_->Tokens("a", described->content_id()),
              StatusIs(StatusCode::kDataLoss, "token ids"));
  EXPECT_TRUE(residence_->IsHere("a")) << "its tokens are read where it lies";
  const auto after = client_->List();
  CARREL_ASSERT_OK(after);
  ASSERT_EQ(after->contexts_size(), 2);
  EXPECT_FALSE(after->contexts(0).elsewhere());
  EXPECT_TRUE(after->contexts(1).elsewhere());
}

TEST_F(WarmTest, Locate_SaysWhatTheServerWasTold) {
  EXPECT_EQ(*client_->Locate("a"), "replica-3.carrel:50051");
  EXPECT_EQ(*client_->Locate("nobody"), "replica-3.carrel:50051");
}

TEST_F(WarmTest, AnAddressThatNobodyCanReach_IsRefused) {
  for (const char* bad : {"somewhere", "host:0", "host:x", "unix:"}) {
    ServerConfig config;
    config.listen.clear();
    config.advertise = bad;
    EXPECT_THAT(Server::Start(config, engine_.get()),
                StatusIs(StatusCode::kInvalidArgument, "advertise"));
  }
}

TEST_F(WarmTest, Health_WaitsForWhatIsToBeWarm) {
  Hold();
  Start(int64_t{1} << 30, {"a", "b", "a"});
  EXPECT_EQ(Health(), "NOT_SERVING");
  EXPECT_EQ(residence_->Statistics().warming, 2);
  EXPECT_FALSE(warming_->ready());
  holds_ = false;
  while (!warming_->ready() || Health() != "SERVING") absl::SleepFor(absl::Milliseconds(2));
  EXPECT_TRUE(residence_->IsHere("a"));
  EXPECT_TRUE(residence_->IsHere("b"));
  EXPECT_EQ(residence_->Statistics().warming, 0);
}

TEST_F(WarmTest, Health_IsNotHeldUpByANameThatTheBucketDoesNotHave) {
  Start(int64_t{1} << 30, {"a", "nobody"});
  while (Health() != "SERVING") absl::SleepFor(absl::Milliseconds(2));
  EXPECT_TRUE(residence_->IsHere("a"));
}

TEST_F(WarmTest, Health_WaitsForABucketThatDoesNotAnswer) {
  fake_.Intercept([](const FakeRequest&) { return FakeReply{.status = 403, .body = "not now"}; });
  Start(int64_t{1} << 30, {"a"});
  const int64_t asked = fake_.requests();
  while (fake_.requests() < asked + 5) absl::SleepFor(absl::Milliseconds(2));
  EXPECT_EQ(Health(), "NOT_SERVING");
  fake_.Intercept(nullptr);
  while (Health() != "SERVING") absl::SleepFor(absl::Milliseconds(2));
}

// A cache that is too small for all of them: never ready, rather than ready without one.
TEST_F(WarmTest, Health_StaysDownWithoutRoomForAll) {
  Start(bytes_ + bytes_ / 2, {"a", "b"});
  while (residence_->Statistics().warming > 1) absl::SleepFor(absl::Milliseconds(2));
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_EQ(Health(), "NOT_SERVING");
  EXPECT_EQ(residence_->Statistics().evictions, 0);
}

TEST_F(WarmTest, Health_OnceDraining_StaysDown) {
  Hold();
  Start(int64_t{1} << 30, {"a"});
  residence_->End();
  server_->Drain(absl::ZeroDuration());
  server_->SetReady();
  holds_ = false;
}

}  // namespace
}  // namespace carrel::kvstore
