// The services over the wire, on the real store.
#include "kvstore/service/server.h"

#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "carrel/v1/context.grpc.pb.h"
#include "common/test_util.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

class ServerTest : public testing::Test {
 protected:
  void SetUp() override {
    RandomContextSpec spec;
    spec.seed = seed_;
    spec.query_drift = true;
    context_ = std::make_unique<RandomContext>(spec);
    dir_ = FreshTempDir();
    MakeStore(dir_, {context_.get()});
    config_.search_threads = 2;
  }
  void TearDown() override {
    channel_.reset();
    server_.reset();
    engine_.reset();
  }

  void StartServer(StoreMode mode = StoreMode::kReadWrite) {
    engine_ = *Engine::Create(config_, *Store::Open(dir_ + "/store", mode));
    server_config_.listen = {"unix:" + socket_, "127.0.0.1:0"};
    auto started = Server::Start(server_config_, engine_.get());
    CARREL_ASSERT_OK(started);
    server_ = *std::move(started);
    channel_ = Channel(server_->addresses()[0]);
  }
  static std::shared_ptr<grpc::Channel> Channel(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }

  QueryRequest MakeQuery(uint64_t seed, int64_t tokens = 1) const {
    QueryRequest request;
    request.layer = Layer(1);
    request.tokens = tokens;
    request.queries = context_->Queries(tokens, seed);
    request.selection = select::TopK{20};
    request.want = Want::kRows;
    return request;
  }
  v1::Query MakeWireQuery(uint64_t seed) const { return WireQuery(MakeQuery(seed), shape()); }
  const AttentionShape& shape() const { return context_->spec().shape; }
  static v1::FetchRows Range(uint32_t layer, int64_t begin, int64_t end) {
    v1::FetchRows fetch;
    fetch.set_layer(layer);
    fetch.mutable_range()->set_begin(begin);
    fetch.mutable_range()->set_end(end);
    return fetch;
  }
  void AwaitNoSessions() {
    while (engine_->sessions() > 0) absl::SleepFor(absl::Milliseconds(1));
  }

  const uint64_t seed_ = TestSeed();
  const std::string socket_ = SocketPath("server");
  std::string dir_;
  std::unique_ptr<RandomContext> context_;
  EngineConfig config_;
  ServerConfig server_config_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(ServerTest, EveryWantAndSelect_TravelsAsTheEngineAnswers) {
  config_.reply_part_bytes = 4096;
  StartServer();
  const auto engine_session = engine_->OpenSession(context_->Opening());
  CARREL_ASSERT_OK(engine_session);
  for (const std::shared_ptr<grpc::Channel>& channel :
       {channel_, Channel(server_->addresses()[1]), server_->InProcessChannel()}) {
    WireSession session(channel);
    const v1::OpenReply opened = session.Open(context_->Opening());
    EXPECT_EQ(opened.tokens(), 700);
    EXPECT_EQ(opened.zone_begin(), 4);
    EXPECT_EQ(opened.zone_end(), 640);
    EXPECT_EQ(opened.manifest().name(), "report");
    EXPECT_EQ(opened.limits().max_top_k(), config_.max_top_k);
    uint64_t id = 1;
    for (Want want : {Want::kIds, Want::kRows, Want::kValues, Want::kAttend}) {
      for (const bool all : {false, true}) {
        QueryRequest request = MakeQuery(seed_ + 1, 3);
        request.want = want;
        if (all) request.selection = select::All();
        request.measure_mass = want == Want::kAttend;
        if (want == Want::kRows) request.held = {{0, 5, 6, 300, 699}, {}};
        auto expected = AskAndCollect(**engine_session, ++id, request);
        CARREL_ASSERT_OK(expected);
        for (CollectedHead& head : expected->heads) head.pieces = 0;
        ASSERT_TRUE(session.SendQuery(id, WireQuery(request, shape())));
        const Parts parts = session.Receive(id);
        ASSERT_FALSE(parts.empty());
        EXPECT_EQ(CollectWire(parts, 3, shape().kv_heads), expected->heads);
        for (const v1::SessionReply& part : parts) EXPECT_LE(part.ByteSizeLong(), 4096u + 512u);
        EXPECT_EQ(parts.back().query().statistics().candidates(), expected->statistics.candidates);
      }
    }
    session.CloseSending();
    EXPECT_TRUE(session.Finish().ok());
  }
}

TEST_F(ServerTest, QueryDrift_TravelsWhenItIsAskedFor) {
  StartServer();
  WireSession plain(channel_), asking(channel_);
  EXPECT_EQ(plain.Open(context_->Opening()).query_drift_size(), 0);
  OpenRequest request = context_->Opening();
  request.query_drift = true;
  const v1::OpenReply opened = asking.Open(request);
  ASSERT_EQ(opened.query_drift_size(), shape().layers);
  EXPECT_EQ(opened.query_drift(0).data(), "");
  for (int32_t layer = 1; layer < shape().layers; ++layer) {
    const v1::Tensor& tensor = opened.query_drift(layer);
    EXPECT_EQ(tensor.dtype(), v1::Tensor::F32);
    EXPECT_THAT(tensor.shape(), testing::ElementsAre(shape().q_heads, shape().head_dim));
    const std::vector<float>& drift = context_->query_drift()[static_cast<size_t>(layer)];
    ASSERT_EQ(tensor.data().size(), drift.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(tensor.data().data(), drift.data(), tensor.data().size()), 0);
  }
}

TEST_F(ServerTest, HeldRowsThatMakeNoSense_AreRefused) {
  StartServer();
  WireSession session(channel_);
  session.Open(context_->Opening());
  uint64_t id = 1;
  const auto refused = [&](const v1::Query& query, const std::string& why) {
    ASSERT_TRUE(session.SendQuery(++id, query));
    const Parts parts = session.Receive(id);
    ASSERT_EQ(parts.size(), 1u);
    EXPECT_EQ(parts[0].error().code(), static_cast<int>(StatusCode::kInvalidArgument));
    EXPECT_THAT(parts[0].error().message(), HasSubstr(why));
  };
  v1::Query query = MakeWireQuery(seed_);
  query.add_held()->add_steps(700);
  refused(query, "held row 700");
  query.mutable_held(0)->add_steps(~uint64_t{0});
  refused(query, "beyond the context's 700 tokens");
  query.mutable_held(0)->clear_steps();
  query.add_held();
  refused(query, "given twice");
  query.mutable_held(1)->set_kv_head(2);
  refused(query, "kv_head=2");
}

TEST_F(ServerTest, FetchRows_ContinuesHeadAfterHead) {
  config_.reply_part_bytes = 4096;
  StartServer();
  WireSession session(channel_);
  session.Open(context_->Opening());
  ASSERT_TRUE(session.SendFetch(2, Range(0, 3, 699)));
  const Parts parts = session.Receive(2);
  EXPECT_GT(parts.size(), 10u);
  std::vector<std::string> k(shape().kv_heads), v(shape().kv_heads);
  const size_t row_bytes = static_cast<size_t>(shape().head_dim) * 2;
  for (const v1::SessionReply& part : parts) {
    for (const auto& block : part.fetch_rows().blocks()) {
      EXPECT_EQ(block.first(), static_cast<int64_t>(k[block.kv_head()].size() / row_bytes));
      k[block.kv_head()] += block.k().data();
      v[block.kv_head()] += block.v().data();
    }
  }
  for (int32_t h = 0; h < shape().kv_heads; ++h) {
    const auto expected = [&](const uint16_t* rows) {
      return std::string(reinterpret_cast<const char*>(rows + 3 * shape().head_dim),
                         696 * row_bytes);
    };
    EXPECT_EQ(k[h], expected(context_->keys(Layer(0), KvHead(h))));
    EXPECT_EQ(v[h], expected(context_->values(Layer(0), KvHead(h))));
  }
}

TEST_F(ServerTest, OpenThatFails_EndsTheStreamWithItsStatus) {
  StartServer();
  OpenRequest other_model = context_->Opening();
  other_model.fingerprint = {{"kv_dtype", "bf16"}, {"weights_sha256", "0ther"}};
  OpenRequest unknown = context_->Opening();
  unknown.context = "nothing";
  OpenRequest negative = context_->Opening(-1);
  OpenRequest nameless = context_->Opening();
  nameless.context = "";
  OpenRequest other_content = context_->Opening();
  other_content.content_id = std::string(64, '0');
  const struct {
    OpenRequest request;
    grpc::StatusCode code;
    const char* message;
  } cases[] = {
      {other_model, grpc::StatusCode::FAILED_PRECONDITION,
       "fingerprint mismatch: weights_sha256: context has 5eed, model has 0ther"},
      {unknown, grpc::StatusCode::NOT_FOUND, "nothing"},
      {other_content, grpc::StatusCode::FAILED_PRECONDITION, "has content id "},
      {negative, grpc::StatusCode::INVALID_ARGUMENT, "sink=-1"},
      {nameless, grpc::StatusCode::INVALID_ARGUMENT, "context is empty"},
  };
  for (const auto& c : cases) {
    WireSession session(channel_);
    session.SendOpen(WireOpen(c.request));
    const grpc::Status status = session.Finish();
    EXPECT_EQ(status.error_code(), c.code);
    EXPECT_THAT(status.error_message(), HasSubstr(c.message));
  }
  WireSession early(channel_);
  early.SendQuery(1, MakeWireQuery(1));
  const grpc::Status status = early.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("first request of a session must be open"));
  WireSession numberless(channel_);
  numberless.SendOpen(WireOpen(context_->Opening()), 0);
  EXPECT_EQ(numberless.Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  AwaitNoSessions();
}

TEST_F(ServerTest, BadRequests_AreAnsweredByErrorAndTheSessionSurvives) {
  config_.max_query_tokens = 8;
  config_.max_fetch_rows = 100;
  StartServer();
  WireSession session(channel_);
  session.Open(context_->Opening());
  using Edit = std::function<void(v1::Query&)>;
  const std::pair<Edit, const char*> queries[] = {
      {[](v1::Query& q) { q.mutable_select()->set_top_k(70000); },
       "query: top_k=70000 exceeds max_top_k=65536 (context=report layer=1)"},
      {[](v1::Query& q) { q.mutable_select()->set_top_k(701); },
       "query: top_k=701 exceeds the context's tokens=700 (context=report layer=1)"},
      {[](v1::Query& q) { q.mutable_select()->set_top_k(0); }, "top_k=0 is less than 1"},
      {[](v1::Query& q) { q.mutable_select()->set_top_k(-5); }, "top_k=-5 is less than 1"},
      {[](v1::Query& q) {
         q.mutable_select()->set_top_k(9);
         q.add_head_top_k(9);
       },
       "head_top_k has 1 values, the context 2 KV heads"},
      {[](v1::Query& q) {
         q.mutable_select()->set_top_k(9);
         q.add_head_top_k(9);
         q.add_head_top_k(10);
       },
       "head_top_k=10 of kv_head 1 is outside [1, top_k=9]"},
      {[](v1::Query& q) {
         q.mutable_select()->set_all(true);
         q.add_head_top_k(1);
         q.add_head_top_k(1);
       },
       "head_top_k shares out a top_k"},
      {[](v1::Query& q) { q.clear_select(); }, "select is not given"},
      {[](v1::Query& q) { q.mutable_select()->set_all(false); }, "all=false selects nothing"},
      {[](v1::Query& q) { q.set_layer(2); }, "layer=2 is outside [0, 2)"},
      {[](v1::Query& q) { q.set_layer(0xffffffff); }, "is outside [0, 2)"},
      {[](v1::Query& q) { q.set_want(v1::WANT_UNSPECIFIED); }, "want=0, expected IDS"},
      {[](v1::Query& q) { q.set_want(static_cast<v1::Want>(77)); }, "want=77, expected IDS"},
      {[](v1::Query& q) { q.clear_queries(); }, "have shape [], expected [tokens, 4, 32]"},
      {[](v1::Query& q) { q.mutable_queries()->set_dtype(v1::Tensor::BF16); }, "are BF16"},
      {[](v1::Query& q) { q.mutable_queries()->set_dtype(static_cast<v1::Tensor::DType>(9)); },
       "are dtype 9"},
      {[](v1::Query& q) { q.mutable_queries()->set_shape(1, 8); }, "have shape [1, 8, 32]"},
      {[](v1::Query& q) { q.mutable_queries()->set_shape(0, 2); }, "of shape [2, 4, 32] have 512"},
      {[](v1::Query& q) { q.mutable_queries()->set_shape(0, -1); }, "of shape [-1, 4, 32]"},
      {[](v1::Query& q) { q.mutable_queries()->set_shape(0, int64_t{1} << 62); }, "of shape ["},
      {[](v1::Query& q) { q.mutable_queries()->mutable_data()->pop_back(); }, "have 511 bytes"},
      {[](v1::Query& q) {
         q.mutable_queries()->set_shape(0, 0);
         q.mutable_queries()->clear_data();
       },
       "queries hold no tokens"},
      {[&](v1::Query& q) { q = WireQuery(MakeQuery(1, 9), shape()); },
       "tokens=9 exceeds max_query_tokens=8"},
      {[](v1::Query& q) {
         const float nan = std::nanf("");
         q.mutable_queries()->mutable_data()->replace(12, 4, reinterpret_cast<const char*>(&nan),
                                                      4);
       },
       "queries[3] is nan"},
      {[](v1::Query& q) { q.set_effort(70000); }, "effort=70000 is outside [0, 65536]"},
      {[](v1::Query& q) { q.set_among_candidates_of(99); },
       "among_candidates_of=99 is not among the latest 8 speculative queries"},
      {[](v1::Query& q) {
         q.set_among_candidates_of(99);
         q.mutable_select()->set_all(true);
       },
       "among_candidates_of needs top_k"},
      {[](v1::Query& q) {
         q.set_speculative(true);
         q.set_want(v1::ATTEND);
       },
       "speculative wants IDS or ROWS"},
      {[](v1::Query& q) {
         q.set_speculative(true);
         q.mutable_select()->set_all(true);
       },
       "speculative needs top_k"},
      {[](v1::Query& q) {
         q.set_speculative(true);
         q.set_among_candidates_of(1);
       },
       "exclude each other"},
      {[](v1::Query& q) {
         q.set_speculative(true);
         q.set_want(v1::IDS);
         q.set_measure_mass(true);
       },
       "measure_mass has no place"},
  };
  const auto ids = [](std::vector<int64_t> ids) {
    v1::FetchRows fetch;
    for (int64_t id : ids) fetch.mutable_ids()->add_id(id);
    fetch.mutable_ids();
    return fetch;
  };
  v1::FetchRows bad_head = Range(0, 0, 1), same_head = Range(0, 0, 1);
  bad_head.add_kv_heads(2);
  same_head.add_kv_heads(1);
  same_head.add_kv_heads(1);
  const std::pair<v1::FetchRows, const char*> fetches[] = {
      {Range(0, -1, 5), "range [-1, 5) is empty or not within [0, 700)"},
      {Range(0, 690, 701), "range [690, 701)"},
      {Range(0, 5, 5), "range [5, 5) is empty"},
      {Range(0, INT64_MIN, INT64_MAX), "is empty or not within"},
      {Range(0, 0, 51), "51 rows of 2 heads exceed max_fetch_rows=100"},
      {Range(5, 0, 5), "fetch rows: layer=5 is outside [0, 2) (context=report layer=5)"},
      {ids({}), "no ids"},
      {ids({1, 700}), "id=700 is outside [0, 700)"},
      {ids({-1}), "id=-1 is outside"},
      {ids({3, 4, 3}), "id=3 is given twice"},
      {ids(std::vector<int64_t>(51, 0)), "51 rows of 2 heads exceed max_fetch_rows=100"},
      {v1::FetchRows(), "rows are not given"},
      {bad_head, "kv_head=2 is outside [0, 2)"},
      {same_head, "kv_head=1 is given twice"},
  };
  std::vector<std::pair<v1::SessionRequest, const char*>> requests;
  for (const auto& [edit, message] : queries) {
    v1::SessionRequest request;
    *request.mutable_query() = MakeWireQuery(1);
    edit(*request.mutable_query());
    requests.emplace_back(request, message);
  }
  for (const auto& [fetch, message] : fetches) {
    v1::SessionRequest request;
    *request.mutable_fetch_rows() = fetch;
    requests.emplace_back(request, message);
  }
  requests.emplace_back(v1::SessionRequest(), "neither query nor fetch_rows");
  uint64_t id = 10;
  for (auto& [request, message] : requests) {
    request.set_request_id(++id);
    ASSERT_TRUE(session.Send(request));
    const Parts parts = session.Receive(id);
    ASSERT_EQ(parts.size(), 1u) << message;
    EXPECT_EQ(parts[0].error().code(), static_cast<int>(StatusCode::kInvalidArgument)) << message;
    EXPECT_THAT(parts[0].error().message(), HasSubstr(message));
  }
  v1::SessionRequest again;
  again.set_request_id(++id);
  *again.mutable_open() = WireOpen(context_->Opening());
  ASSERT_TRUE(session.Send(again));
  EXPECT_THAT(session.Receive(id).at(0).error().message(), HasSubstr("open already"));
  ASSERT_TRUE(session.SendQuery(0, MakeWireQuery(1)));
  EXPECT_THAT(session.Receive(0).at(0).error().message(), HasSubstr("request_id is 0"));
  ASSERT_TRUE(session.SendQuery(++id, MakeWireQuery(1)));
  EXPECT_TRUE(session.Receive(id).at(0).has_query());
}

TEST_F(ServerTest, QueueFull_IsAnErrorAndTheSessionSurvives) {
  config_.queue_limit = 2;
  config_.max_in_flight = 5;
  StartServer();
  WireSession session(channel_);
  session.Open(context_->Opening());
  {
    Blockade blockade(*engine_, 2);
    for (uint64_t id = 2; id <= 4; ++id) ASSERT_TRUE(session.SendQuery(id, MakeWireQuery(id)));
    const Parts refused = session.Receive(4);
    ASSERT_EQ(refused.size(), 1u);
    EXPECT_EQ(refused[0].error().code(), static_cast<int>(StatusCode::kResourceExhausted));
    EXPECT_THAT(refused[0].error().message(), HasSubstr("queue_limit=2"));
    ASSERT_TRUE(session.SendQuery(3, MakeWireQuery(3)));
    EXPECT_THAT(session.Receive(3).at(0).error().message(),
                HasSubstr("request_id=3 is in flight already"));
  }
  EXPECT_TRUE(session.Receive(2).at(0).has_query());
  EXPECT_TRUE(session.Receive(3).at(0).has_query());
  ASSERT_TRUE(session.SendQuery(4, MakeWireQuery(4)));
  EXPECT_TRUE(session.Receive(4).at(0).has_query());
}

TEST_F(ServerTest, ClientThatCancelsMidQuery_LeavesNothingBehind) {
  StartServer();
  {
    Blockade blockade(*engine_, 2);
    WireSession session(channel_);
    session.SendOpen(WireOpen(context_->Opening()));
    session.Cancel();
    EXPECT_EQ(session.Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  AwaitNoSessions();
  auto session = std::make_unique<WireSession>(channel_);
  session->Open(context_->Opening());
  {
    Blockade blockade(*engine_, 2);
    for (uint64_t id = 2; id <= 9; ++id) ASSERT_TRUE(session->SendQuery(id, MakeWireQuery(id)));
    session.reset();
  }
  AwaitNoSessions();
  WireSession next(channel_);
  next.Open(context_->Opening());
  ASSERT_TRUE(next.SendQuery(2, MakeWireQuery(2)));
  EXPECT_TRUE(next.Receive(2).at(0).has_query());
}

TEST_F(ServerTest, ClientThatDoesNotRead_GetsEverythingWhenItDoesAndDelaysNobody) {
  config_.reply_part_bytes = 16384;
  StartServer();
  WireSession slow(channel_);
  slow.Open(context_->Opening());
  std::thread sender([&] {
    // Far more than windows hold; the last ones are sent when replies are being read.
    for (uint64_t id = 2; id <= 50; ++id) EXPECT_TRUE(slow.SendFetch(id, Range(0, 0, 700)));
  });
  WireSession other(Channel(server_->addresses()[0]));
  other.Open(context_->Opening());
  for (uint64_t id = 2; id <= 20; ++id) {
    ASSERT_TRUE(other.SendQuery(id, MakeWireQuery(id)));
    EXPECT_TRUE(other.Receive(id).at(0).has_query());
  }
  for (uint64_t id = 2; id <= 50; ++id) {
    int64_t rows = 0;
    for (const v1::SessionReply& part : slow.Receive(id)) {
      for (const auto& block : part.fetch_rows().blocks()) rows += block.k().shape(0);
    }
    EXPECT_EQ(rows, 700 * shape().kv_heads);
  }
  sender.join();
}

TEST_F(ServerTest, ClientThatClosesItsHalf_GetsWhatIsInFlight) {
  StartServer();
  WireSession session(channel_);
  session.Open(context_->Opening());
  {
    Blockade blockade(*engine_, 2);
    for (uint64_t id = 2; id <= 5; ++id) ASSERT_TRUE(session.SendQuery(id, MakeWireQuery(id)));
    session.CloseSending();
  }
  for (uint64_t id = 2; id <= 5; ++id) EXPECT_TRUE(session.Receive(id).at(0).has_query());
  EXPECT_TRUE(session.Finish().ok());
}

TEST_F(ServerTest, FlippedBit_IsDataLossNamingThePlaceAndTheSessionSurvives) {
  const uint16_t* rows = context_->values(Layer(1), KvHead(1)) + 200 * shape().head_dim;
  ASSERT_TRUE(FlipBitOf(dir_ + "/store", std::string(reinterpret_cast<const char*>(rows), 64)));
  StartServer();
  WireSession session(channel_);
  session.Open(context_->Opening());
  QueryRequest request = MakeQuery(2);
  request.selection = select::All();
  request.want = Want::kAttend;
  ASSERT_TRUE(session.SendQuery(2, WireQuery(request, shape())));
  ASSERT_TRUE(session.SendFetch(3, Range(1, 0, 700)));
  for (uint64_t id : {2, 3}) {
    const Parts parts = session.Receive(id);
    ASSERT_FALSE(parts.empty());
    EXPECT_EQ(parts.back().error().code(), static_cast<int>(StatusCode::kDataLoss));
    for (const char* part : {"report", "layer 1", "kv_head 1", "segment 1"}) {
      EXPECT_THAT(parts.back().error().message(), HasSubstr(part));
    }
  }
  ASSERT_TRUE(session.SendFetch(4, Range(0, 0, 10)));
  EXPECT_TRUE(session.Receive(4).at(0).has_fetch_rows());
}

TEST_F(ServerTest, SixteenSessions_GetWhatEachGetsAlone) {
  config_.search_threads = 3;
  config_.reply_part_bytes = 8192;
  StartServer();
  constexpr int kSessions = 16, kRequests = 8;
  const auto request_of = [&](int session, int i) {
    std::mt19937_64 rng(seed_ + 100 * session + i);
    QueryRequest request = MakeQuery(rng(), 1 + rng() % 3);
    request.want = static_cast<Want>(rng() % 4);
    if (rng() % 4 == 0) request.selection = select::All();
    return request;
  };
  // Several requests in flight at a time.
  const auto run = [&](int s, const std::shared_ptr<grpc::Channel>& channel) {
    WireSession session(channel);
    session.Open(context_->Opening());
    for (int i = 0; i < kRequests; ++i) {
      session.SendQuery(i + 2, WireQuery(request_of(s, i), shape()));
    }
    std::vector<std::vector<CollectedHead>> answers;
    for (int i = 0; i < kRequests; ++i) {
      answers.push_back(CollectWire(session.Receive(i + 2), request_of(s, i).tokens, 2));
    }
    return answers;
  };
  std::vector<std::vector<std::vector<CollectedHead>>> alone, together(kSessions);
  for (int s = 0; s < kSessions; ++s) alone.push_back(run(s, channel_));
  std::vector<std::thread> threads;
  for (int s = 0; s < kSessions; ++s) {
    threads.emplace_back([&, s] {
      together[s] = run(s, s % 2 == 0 ? channel_ : Channel(server_->addresses()[s / 2 % 2]));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(alone, together);
}

TEST_F(ServerTest, MutatedRequests_NeverStopTheServer) {
  config_.max_query_tokens = 8;
  StartServer();
  std::mt19937_64 rng(seed_);
  QueryRequest ahead = MakeQuery(2);
  ahead.speculative = true;
  ahead.want = Want::kIds;
  v1::SessionRequest samples[4];
  *samples[0].mutable_open() = WireOpen(context_->Opening());
  *samples[1].mutable_query() = MakeWireQuery(1);
  *samples[2].mutable_query() = WireQuery(ahead, shape());
  *samples[3].mutable_fetch_rows() = Range(0, 0, 50);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::string> messages;
    if (round % 4 != 0) {
      v1::SessionRequest open = samples[0];
      open.set_request_id(1);
      messages.push_back(open.SerializeAsString());
    }
    for (int i = 0; i < 10; ++i) {
      v1::SessionRequest request = samples[rng() % 4];
      request.set_request_id(2 + rng() % 20);
      std::string bytes = request.SerializeAsString();
      for (uint64_t flips = rng() % 4; flips > 0; --flips) {
        // Mostly where the structure is: the front.
        bytes[rng() % (rng() % 2 == 0 ? std::min<size_t>(40, bytes.size()) : bytes.size())] =
            static_cast<char>(rng());
      }
      if (rng() % 8 == 0) bytes.resize(rng() % bytes.size());
      messages.push_back(bytes);
    }
    SendRaw(channel_, messages);
  }
  AwaitNoSessions();
  WireSession session(channel_);
  session.Open(context_->Opening());
  ASSERT_TRUE(session.SendQuery(2, MakeWireQuery(2)));
  EXPECT_TRUE(session.Receive(2).at(0).has_query());
}

TEST_F(ServerTest, ContextService_ListsGetsAndDeletes) {
  StartServer();
  const auto stub = v1::ContextService::NewStub(channel_);
  const auto list = [&] {
    grpc::ClientContext context;
    v1::ListResponse response;
    EXPECT_TRUE(stub->List(&context, {}, &response).ok());
    return response;
  };
  const auto remove = [&](const std::string& name) {
    grpc::ClientContext context;
    v1::DeleteRequest request;
    request.set_name(name);
    v1::DeleteResponse response;
    return stub->Delete(&context, request, &response);
  };
  ASSERT_EQ(list().contexts_size(), 1);
  EXPECT_EQ(list().contexts(0).name(), "report");
  EXPECT_EQ(list().contexts(0).tokens(), 700);
  {
    grpc::ClientContext context;
    v1::GetRequest request;
    request.set_name("report");
    v1::GetResponse response;
    EXPECT_TRUE(stub->Get(&context, request, &response).ok());
    EXPECT_EQ(response.manifest().fingerprint().fields(1).value(), "5eed");
  }
  EXPECT_EQ(remove("nothing").error_code(), grpc::StatusCode::NOT_FOUND);
  {
    WireSession session(channel_);
    session.Open(context_->Opening());
    const grpc::Status status = remove("report");
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
    EXPECT_THAT(status.error_message(), HasSubstr("1 sessions have it open"));
  }
  AwaitNoSessions();
  EXPECT_TRUE(remove("report").ok());
  EXPECT_EQ(list().contexts_size(), 0);
}

TEST_F(ServerTest, ReadOnlyStore_RefusesDeleteSayingSo) {
  StartServer(StoreMode::kReadOnly);
  const auto stub = v1::ContextService::NewStub(channel_);
  grpc::ClientContext context;
  v1::DeleteRequest request;
  request.set_name("report");
  v1::DeleteResponse response;
  const grpc::Status status = stub->Delete(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("read-only"));
}

TEST_F(ServerTest, HealthAndReflection_Answer) {
  server_config_.reflection = true;
  StartServer();
  for (const char* service : {"", "carrel.v1.RetrievalService", "carrel.v1.ContextService"}) {
    EXPECT_EQ(HealthOf(channel_, service), "SERVING") << service;
  }
  EXPECT_NE(HealthOf(channel_, "no.such.Service"), "SERVING");
  const std::string services = ReflectedServices(channel_);
  EXPECT_THAT(services, HasSubstr("carrel.v1.RetrievalService"));
  EXPECT_THAT(services, HasSubstr("carrel.v1.ContextService"));
  EXPECT_THAT(services, HasSubstr("grpc.health.v1.Health"));
}

TEST_F(ServerTest, Drain_RefusesNewSessionsAndWaitsForRunningOnes) {
  StartServer();
  WireSession session(channel_);
  session.Open(context_->Opening());
  std::thread draining([&] { server_->Drain(absl::InfiniteDuration()); });
  while (HealthOf(channel_, "") == "SERVING") absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(HealthOf(channel_, "carrel.v1.RetrievalService"), "NOT_SERVING");
  const auto refused = [&] {
    WireSession late(channel_);
    late.SendOpen(WireOpen(context_->Opening()));
    return late.Finish();
  };
  // Health changes just before sessions are refused.
  grpc::Status status = refused();
  for (; status.error_code() != grpc::StatusCode::UNAVAILABLE; status = refused()) {
  }
  EXPECT_THAT(status.error_message(), HasSubstr("draining"));
  ASSERT_TRUE(session.SendQuery(2, MakeWireQuery(2)));
  EXPECT_TRUE(session.Receive(2).at(0).has_query());
  session.CloseSending();
  EXPECT_TRUE(session.Finish().ok());
  draining.join();
  EXPECT_FALSE(std::filesystem::exists(socket_));
}

TEST_F(ServerTest, Drain_AtItsDeadlineCutsWhatIsLeft) {
  StartServer();
  WireSession session(channel_);
  session.Open(context_->Opening());
  server_->Drain(absl::Milliseconds(50));
  const grpc::Status status = session.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("shutting down"));
  EXPECT_EQ(engine_->sessions(), 0);
}

TEST_F(ServerTest, DestroyedMidQuery_EndsSessionsAsUnavailable) {
  StartServer();
  WireSession session(channel_);
  session.Open(context_->Opening());
  {
    Blockade blockade(*engine_, 2);
    ASSERT_TRUE(session.SendQuery(2, MakeWireQuery(2)));
    server_.reset();
  }
  EXPECT_EQ(session.Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServerTest, AddressInUse_IsAClearError) {
  StartServer();
  for (const std::string& address : server_->addresses()) {
    ServerConfig config;
    config.listen = {address};
    EXPECT_THAT(Server::Start(config, engine_.get()),
                StatusIs(StatusCode::kFailedPrecondition, "address in use"))
        << address;
  }
  ServerConfig config;
  config.listen = {"nonsense"};
  EXPECT_THAT(Server::Start(config, engine_.get()),
              StatusIs(StatusCode::kInvalidArgument, "listen address \"nonsense\""));
  EXPECT_EQ(HealthOf(channel_, ""), "SERVING");
}

}  // namespace
}  // namespace carrel::kvstore
