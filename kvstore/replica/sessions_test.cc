// Sessions with a server whose contexts are in a bucket: they wait for the first bytes, and read like others then.
#include <atomic>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/test_util.h"
#include "kvstore/remote/push.h"
#include "kvstore/remote/remote_test_util.h"
#include "kvstore/replica/residence.h"
#include "kvstore/replica/residence_test_util.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/server.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

class ReplicaSessionsTest : public testing::Test {
 protected:
  ReplicaSessionsTest() {
    RandomContextSpec spec;
    spec.seed = seed_;
    context_ = std::make_unique<RandomContext>(spec);
    const std::unique_ptr<Store> source = MakeStore(folder_ + "/source", {context_.get()});
    const auto from = source->Export("report");
    CARREL_CHECK(from.ok());
    const Bucket bucket(TestClient(fake_.endpoint()), "");
    CARREL_CHECK(PushContext(bucket, **from, "report", [](int64_t, int64_t) {}).ok());
    engine_ = *Engine::Create({.search_threads = 2}, MakeStore(folder_ + "/here", {}));
    ResidenceConfig config;
    config.cache_bytes = int64_t{1} << 30;
    config.pull.range_bytes = 4096;
    residence_ = *Residence::Create(
        config, std::make_unique<Bucket>(TestClient(fake_.endpoint()), ""),
        std::make_unique<Bucket>(TestClient(fake_.endpoint()), ""), TargetOf(*engine_));
    ServerConfig server;
    server.listen.clear();
    server.source = residence_.get();
    server_ = *Server::Start(server, engine_.get());
    channel_ = server_->InProcessChannel();
  }
  v1::Open Opening(const std::string& name) {
    OpenRequest request = context_->Opening();
    request.context = name;
    return WireOpen(request);
  }

  const uint64_t seed_ = TestSeed();
  const std::string folder_ = FreshTempDir();
  FakeS3 fake_;
  std::unique_ptr<RandomContext> context_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Residence> residence_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(ReplicaSessionsTest, ManyAskForAContextThatIsNotHere_AllAreAnsweredByOnePull) {
  // Engine threads stay free while bytes come: there are two, and eighty sessions.
  constexpr int kSessions = 80;
  std::atomic<int> opened{0}, told{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kSessions; ++i) {
    threads.emplace_back([&] {
      WireSession session(channel_);
      ASSERT_TRUE(session.SendOpen(Opening("report")));
      const Parts parts = session.Receive(1);
      ASSERT_FALSE(parts.empty());
      for (size_t part = 0; part + 1 < parts.size(); ++part) {
        ASSERT_TRUE(parts[part].has_fetching());
        EXPECT_FALSE(parts[part].last());
        EXPECT_LE(parts[part].fetching().bytes(), parts[part].fetching().of());
        ++told;
      }
      ASSERT_TRUE(parts.back().has_open()) << parts.back().ShortDebugString();
      EXPECT_EQ(parts.back().open().tokens(), context_->spec().tokens);
      QueryRequest query;
      query.layer = Layer(1);
      query.tokens = 1;
      query.queries = context_->Queries(1, seed_);
      query.selection = select::TopK{8};
      ASSERT_TRUE(session.SendQuery(2, WireQuery(query, context_->spec().shape)));
      EXPECT_FALSE(session.Receive(2).empty());
      ++opened;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(opened, kSessions);
  EXPECT_GT(told, 0);
  EXPECT_EQ(residence_->Statistics().pulls, 1);
}

// What lies here is the bucket's: who deleted or brought one here would make the two differ.
TEST_F(ReplicaSessionsTest, DeletingAndBringingHere_AreRefused) {
  CARREL_ASSERT_OK(BringAndWait(*residence_, "report"));
  ContextClient client(channel_, "replica", absl::Seconds(30));
  EXPECT_THAT(client.Delete("report"),
              StatusIs(absl::StatusCode::kFailedPrecondition, "those of a bucket"));
  const auto nothing = [](int64_t) -> absl::StatusOr<absl::string_view> { return "x"; };
  EXPECT_THAT(client.Import("other", nothing, [](int64_t, int64_t) {}),
              StatusIs(absl::StatusCode::kFailedPrecondition, "those of a bucket"));
  WireSession again(channel_);
  again.Open(context_->Opening());
}

TEST_F(ReplicaSessionsTest, NoSuchContext_EndsTheSession) {
  WireSession session(channel_);
  ASSERT_TRUE(session.SendOpen(Opening("nobody")));
  const grpc::Status status = session.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND) << status.error_message();
  EXPECT_TRUE(absl::StrContains(status.error_message(), "nobody"));
}

TEST_F(ReplicaSessionsTest, WhoLeaves_IsNotWaitedFor) {
  // Nothing comes: the bucket holds back.
  std::atomic<bool> holds{true}, begun{false};
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    while (holds && absl::StrContains(request.key, ".sst")) {
      begun = true;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return std::nullopt;
  });
  {
    WireSession session(channel_);
    ASSERT_TRUE(session.SendOpen(Opening("report")));
    while (!begun) absl::SleepFor(absl::Milliseconds(5));
    session.Cancel();
  }
  holds = false;
  // The pull goes on, for others.
  while (residence_->Statistics().pulls == 0) absl::SleepFor(absl::Milliseconds(5));
  WireSession another(channel_);
  another.Open(context_->Opening());
  fake_.Intercept(nullptr);
}

TEST_F(ReplicaSessionsTest, ADeadline_CountsNotWhatIsFetched) {
  std::atomic<bool> holds{true};
  fake_.Intercept([&](const FakeRequest& request) -> std::optional<FakeReply> {
    while (holds && absl::StrContains(request.key, ".sst")) absl::SleepFor(absl::Milliseconds(5));
    return std::nullopt;
  });
  WireSession session(channel_);
  v1::SessionRequest request;
  request.set_request_id(1);
  request.set_timeout_us(200'000);
  *request.mutable_open() = Opening("report");
  ASSERT_TRUE(session.Send(request));
  absl::SleepFor(absl::Milliseconds(400));
  holds = false;
  const Parts parts = session.Receive(1);
  ASSERT_FALSE(parts.empty());
  EXPECT_TRUE(parts.back().has_open()) << parts.back().ShortDebugString();
  fake_.Intercept(nullptr);
}

}  // namespace
}  // namespace carrel::kvstore
