// What many clients may take of a server: connections, streams, sessions, time.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.grpc.pb.h"
#include "common/test_util.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/server.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/service/session_registry.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

class ConnectionsTest : public testing::Test {
 protected:
  void SetUp() override {
    RandomContextSpec spec;
    spec.seed = TestSeed();
    context_ = std::make_unique<RandomContext>(spec);
    dir_ = FreshTempDir();
    MakeStore(dir_, {context_.get()});
    engine_config_.search_threads = 2;
    config_.listen = {"127.0.0.1:0"};
  }
  void Start() {
    engine_ = *Engine::Create(engine_config_, *Store::Open(dir_ + "/store", StoreMode::kReadWrite));
    auto server = Server::Start(config_, engine_.get());
    CARREL_ASSERT_OK(server);
    server_ = *std::move(server);
  }
  std::shared_ptr<grpc::Channel> NewChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(-1);
    return grpc::CreateCustomChannel(server_->addresses()[0], grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  // A TCP connection that says nothing.
  int Silent() const {
    const std::string& address = server_->addresses()[0];
    int port = 0;
    EXPECT_TRUE(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    return fd;
  }
  template <typename Condition>
  static void Await(const Condition& condition) {
    while (!condition()) absl::SleepFor(absl::Milliseconds(1));
  }
  static void ExpectAnswers(const std::shared_ptr<grpc::Channel>& channel,
                            const RandomContext& context) {
    WireSession session(channel);
    session.Open(context.Opening());
    QueryRequest request;
    request.layer = Layer(1);
    request.tokens = 1;
    request.queries = context.Queries(1, 7);
    request.selection = select::TopK{5};
    request.want = Want::kAttend;
    ASSERT_TRUE(session.SendQuery(2, WireQuery(request, context.spec().shape)));
    EXPECT_TRUE(session.Receive(2).at(0).has_query());
  }

  std::string dir_;
  std::unique_ptr<RandomContext> context_;
  EngineConfig engine_config_;
  ServerConfig config_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Server> server_;
};

TEST_F(ConnectionsTest, SilentConnectionsUpToTheLimit_OneMoreIsRefusedUntilTheyEnd) {
  config_.limits.max_connections = 20;
  Start();
  std::vector<int> silent;
  for (int i = 0; i < 30; ++i) silent.push_back(Silent());
  Await([&] { return server_->statistics().connections_refused >= 10; });
  EXPECT_EQ(server_->statistics().connections, 20);
  EXPECT_NE(HealthOf(NewChannel(), ""), "SERVING");
  for (const int fd : silent) close(fd);
  Await([&] { return server_->statistics().connections == 0; });
  EXPECT_EQ(HealthOf(NewChannel(), ""), "SERVING");
  ExpectAnswers(NewChannel(), *context_);
}

TEST_F(ConnectionsTest, StreamsThatNeverOpen_AreCountedAndEnded) {
  engine_config_.max_sessions = 4;
  config_.limits.open_timeout = absl::Milliseconds(200);
  Start();
  const auto channel = NewChannel();
  std::vector<std::unique_ptr<WireSession>> unopened;
  for (int i = 0; i < 4; ++i) unopened.push_back(std::make_unique<WireSession>(channel));
  Await([&] { return server_->statistics().sessions_not_opened == 4; });
  for (auto& session : unopened) {
    const grpc::Status status = session->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_THAT(status.error_message(), HasSubstr("no open request within 200ms"));
  }
  Await([&] { return server_->statistics().sessions == 0; });
  ExpectAnswers(channel, *context_);
}

TEST_F(ConnectionsTest, SessionsCountFromTheirStart) {
  engine_config_.max_sessions = 4;
  Start();
  const auto channel = NewChannel();
  std::vector<std::unique_ptr<WireSession>> unopened;
  for (int i = 0; i < 4; ++i) unopened.push_back(std::make_unique<WireSession>(channel));
  Await([&] { return server_->statistics().sessions == 4; });
  WireSession late(channel);
  const grpc::Status status = late.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("max_sessions=4"));
  EXPECT_EQ(server_->statistics().sessions_refused, 1);
  unopened.clear();
  Await([&] { return server_->statistics().sessions == 0; });
  ExpectAnswers(channel, *context_);
}

TEST_F(ConnectionsTest, SessionsOfOnePeer_HaveALimitOfTheirOwn) {
  config_.limits.max_sessions_per_peer = 2;
  Start();
  WireSession first(NewChannel()), second(NewChannel());
  first.Open(context_->Opening());
  second.Open(context_->Opening());
  WireSession third(NewChannel());
  const grpc::Status status = third.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("of ipv4:127.0.0.1 are open"));
  // Another peer is not concerned.
  ExpectAnswers(server_->InProcessChannel(), *context_);
}

TEST_F(ConnectionsTest, IdleSession_EndsAndOneThatAsksDoesNot) {
  config_.limits.idle_timeout = absl::Milliseconds(300);
  Start();
  WireSession idle(NewChannel());
  idle.Open(context_->Opening());
  WireSession busy(NewChannel());
  busy.Open(context_->Opening());
  v1::FetchRows fetch;
  fetch.mutable_range()->set_end(1);
  uint64_t id = 1;
  Await([&] {
    EXPECT_TRUE(busy.SendFetch(++id, fetch));
    EXPECT_EQ(busy.Receive(id).size(), 1u);
    return server_->statistics().sessions_idle == 1;
  });
  const grpc::Status status = idle.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("idle for 300ms"));
}

TEST_F(ConnectionsTest, ClientThatTakesNothing_IsEndedThoughItGoesOnAsking) {
  config_.limits.stall_timeout = absl::Milliseconds(300);
  Start();
  auto stalled = std::make_unique<WireSession>(NewChannel());
  stalled->Open(context_->Opening());
  v1::FetchRows all;
  all.mutable_range()->set_end(700);
  for (uint64_t id = 2; id <= 40; ++id) EXPECT_TRUE(stalled->SendFetch(id, all));
  Await([&] { return server_->statistics().sessions_stalled == 1; });
  Await([&] { return server_->statistics().sessions == 0; });
  EXPECT_FALSE(stalled->Finish().ok());
  ExpectAnswers(NewChannel(), *context_);
}

TEST_F(ConnectionsTest, BytesThatAreNoRequest_AreInvalidArgument) {
  Start();
  v1::SessionRequest open;
  open.set_request_id(1);
  *open.mutable_open() = WireOpen(context_->Opening());
  for (const std::vector<std::string>& messages :
       {std::vector<std::string>{"\xff\xff\xff"},
        std::vector<std::string>{open.SerializeAsString(), "\x0a\x7f"}}) {
    const grpc::Status status = SendRaw(NewChannel(), messages);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("bytes that are no SessionRequest"));
  }
}

TEST_F(ConnectionsTest, RequestLargerThanTheContextTakes_IsRefusedByItsSize) {
  Start();
  v1::SessionRequest open;
  open.set_request_id(1);
  *open.mutable_open() = WireOpen(context_->Opening());
  v1::SessionRequest large;
  large.set_request_id(2);
  large.mutable_query()->mutable_queries()->mutable_data()->resize(2 << 20);
  const grpc::Status status =
      SendRaw(NewChannel(), {open.SerializeAsString(), large.SerializeAsString()});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("the most that one of this context takes"));
  const grpc::Status before_open = SendRaw(NewChannel(), {large.SerializeAsString()});
  EXPECT_EQ(before_open.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(before_open.error_message(), HasSubstr("the most that open takes"));
}

TEST_F(ConnectionsTest, LargestRequestOfAContext_IsTaken) {
  Start();
  WireSession session(NewChannel());
  session.Open(context_->Opening());
  QueryRequest request;
  request.layer = Layer(0);
  request.tokens = engine_config_.max_query_tokens;
  request.queries = context_->Queries(request.tokens, 3);
  request.selection = select::TopK{3};
  request.want = Want::kRows;
  request.held.resize(static_cast<size_t>(context_->spec().shape.kv_heads));
  for (auto& held : request.held) {
    for (Position id = 0; id < 700; ++id) held.push_back(id);
  }
  ASSERT_TRUE(session.SendQuery(2, WireQuery(request, context_->spec().shape)));
  EXPECT_TRUE(session.Receive(2).at(0).has_query());
}

TEST_F(ConnectionsTest, Reflection_IsOffUnlessWanted) {
  Start();
  EXPECT_THAT(ReflectedServices(NewChannel()), testing::Not(HasSubstr("carrel.v1")));
}

TEST_F(ConnectionsTest, LimitsOutOfRange_AreRefusedByName) {
  Start();
  const std::pair<std::function<void(ServiceLimits&)>, const char*> cases[] = {
      {[](ServiceLimits& l) { l.max_connections = -1; }, "max_connections=-1"},
      {[](ServiceLimits& l) { l.max_streams = 0; }, "max_streams=0"},
      {[](ServiceLimits& l) { l.max_sessions_per_peer = -2; }, "max_sessions_per_peer=-2"},
      {[](ServiceLimits& l) { l.open_timeout = absl::ZeroDuration(); }, "open_timeout=0"},
      {[](ServiceLimits& l) { l.max_connections = int64_t{1} << 20; }, "file descriptors"},
  };
  for (const auto& [edit, why] : cases) {
    ServerConfig config = config_;
    edit(config.limits);
    EXPECT_THAT(Server::Start(config, engine_.get()).status(),
                StatusIs(StatusCode::kInvalidArgument, why));
  }
}

TEST(HostOfPeer, LosesThePort) {
  EXPECT_EQ(HostOfPeer("ipv4:10.0.0.7:50051"), "ipv4:10.0.0.7");
  EXPECT_EQ(HostOfPeer("ipv6:%5B::1%5D:443"), "ipv6:%5B::1%5D");
  EXPECT_EQ(HostOfPeer("unix:/run/carrel.sock"), "unix");
  EXPECT_EQ(HostOfPeer("unix:"), "unix");
}

// As gRPC ends calls that run when a server stops.
class StoppingService final : public v1::ContextService::Service {
  grpc::Status Get(grpc::ServerContext* context, const v1::GetRequest*, v1::GetResponse*) override {
    context->TryCancel();
    return grpc::Status::OK;
  }
};

TEST(ContextClientTest, AServerThatStopsInACall_IsUnavailable) {
  StoppingService service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ASSERT_NE(server, nullptr);
  const std::string address = absl::StrCat("127.0.0.1:", port);
  ContextClient client(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()), address,
                       absl::Seconds(60), "");
  EXPECT_THAT(client.Get("report"), StatusIs(StatusCode::kUnavailable, address));
}

}  // namespace
}  // namespace carrel::kvstore
