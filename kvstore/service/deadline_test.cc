// Requests whose time is over before the engine comes to them: nobody computes what nobody waits for.
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.grpc.pb.h"
#include "carrel/v1/context.pb.h"
#include "common/test_util.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/server.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

// The engine's only thread is held up until GoOn.
class DeadlineTest : public testing::Test {
 protected:
  void SetUp() override {
    RandomContextSpec spec;
    spec.seed = seed_;
    context_ = std::make_unique<RandomContext>(spec);
    engine_ = *Engine::Create({.search_threads = 1}, MakeStore(FreshTempDir(), {context_.get()}));
    ServerConfig config;
    config.listen.clear();
    server_ = *Server::Start(config, engine_.get());
    channel_ = server_->InProcessChannel();
  }
  void HoldUp() {
    CARREL_ASSERT_OK(engine_->Submit([this] { go_on_.WaitForNotification(); }));
  }
  void AwaitWaiting(int64_t requests) {
    while (engine_->Statistics().waiting() < requests) absl::SleepFor(absl::Milliseconds(1));
  }
  void Send(WireSession& session, uint64_t id, int64_t timeout_us) {
    QueryRequest query;
    query.layer = Layer(1);
    query.tokens = 1;
    query.queries = context_->Queries(1, seed_ + id);
    query.selection = select::TopK{20};
    query.want = Want::kRows;
    v1::SessionRequest request;
    request.set_request_id(id);
    request.set_timeout_us(timeout_us);
    *request.mutable_query() = WireQuery(query, context_->spec().shape);
    ASSERT_TRUE(session.Send(request));
  }
  static StatusCode CodeOf(WireSession& session, uint64_t id) {
    const Parts parts = session.Receive(id);
    EXPECT_FALSE(parts.empty());
    return parts.empty() ? StatusCode::kUnknown
                         : static_cast<StatusCode>(parts.back().error().code());
  }

  const uint64_t seed_ = TestSeed();
  std::unique_ptr<RandomContext> context_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  absl::Notification go_on_;
};

TEST_F(DeadlineTest, Requests_AreLeftOnceTheirTimeIsOver) {
  WireSession session(channel_);
  session.Open(context_->Opening());
  HoldUp();
  Send(session, 2, 1000);
  Send(session, 3, 0);
  Send(session, 4, -1);
  Send(session, 5, 600'000'000);
  AwaitWaiting(3);
  absl::SleepFor(absl::Milliseconds(2));
  go_on_.Notify();
  EXPECT_EQ(CodeOf(session, 2), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(CodeOf(session, 3), StatusCode::kOk);
  EXPECT_EQ(CodeOf(session, 4), StatusCode::kInvalidArgument);
  EXPECT_EQ(CodeOf(session, 5), StatusCode::kOk);
  const v1::StatisticsResponse statistics = engine_->Statistics();
  ASSERT_EQ(statistics.latencies_size(), 1);
  EXPECT_EQ(statistics.latencies(0).kind(), "rows");
  EXPECT_EQ(statistics.latencies(0).count(), 2);
  session.CloseSending();
  EXPECT_TRUE(session.Finish().ok());
}

TEST_F(DeadlineTest, Open_IsRefusedOnceItsTimeIsOver) {
  HoldUp();
  WireSession session(channel_);
  v1::SessionRequest request;
  request.set_request_id(1);
  request.set_timeout_us(1000);
  *request.mutable_open() = WireOpen(context_->Opening());
  ASSERT_TRUE(session.Send(request));
  AwaitWaiting(1);
  absl::SleepFor(absl::Milliseconds(2));
  go_on_.Notify();
  EXPECT_EQ(session.Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_EQ(engine_->Statistics().open_contexts(), 0);
}

// Deleting late what a client has given up deleting would be a surprise to him.
TEST_F(DeadlineTest, Calls_AreLeftOnceTheirTimeIsOver) {
  HoldUp();
  const auto contexts = v1::ContextService::NewStub(channel_);
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  v1::DeleteRequest request;
  request.set_name(context_->spec().name);
  v1::DeleteResponse response;
  EXPECT_EQ(contexts->Delete(&call, request, &response).error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  AwaitWaiting(1);
  absl::SleepFor(absl::Milliseconds(300));  // the server's timer is its own
  go_on_.Notify();
  grpc::ClientContext later;
  v1::GetRequest get;
  get.set_name(context_->spec().name);
  v1::GetResponse found;
  EXPECT_TRUE(contexts->Get(&later, get, &found).ok());
}

}  // namespace
}  // namespace carrel::kvstore
