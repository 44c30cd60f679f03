// A document's tokens over the wire: part by part, and only of what is asked for.
#include "carrel/v1/context.grpc.pb.h"
#include "common/test_util.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/server.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

class TokensTest : public testing::Test {
 protected:
  void Start(int64_t tokens) {
    RandomContextSpec spec;
    spec.seed = TestSeed();
    spec.tokens = tokens;
    spec.shape = {.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 8};
    spec.document = true;
    context_ = std::make_unique<RandomContext>(spec);
    folder_ = FreshTempDir();
    engine_ = *Engine::Create({}, MakeStore(folder_, {context_.get()}));
    ServerConfig config;
    config.listen.clear();
    server_ = *Server::Start(config, engine_.get());
    client_ = std::make_unique<ContextClient>(server_->InProcessChannel(), "here",
                                              absl::InfiniteDuration());
  }
  // One part; its status.
  grpc::Status Ask(int64_t begin, const std::string& content_id, v1::TokensResponse& response) {
    grpc::ClientContext context;
    v1::TokensRequest request;
    request.set_name("report");
    request.set_begin(begin);
    request.set_content_id(content_id);
    return v1::ContextService::NewStub(server_->InProcessChannel())
        ->Tokens(&context, request, &response);
  }
  std::string ContentId() { return client_->Get("report")->content_id(); }

  std::string folder_;
  std::unique_ptr<RandomContext> context_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<ContextClient> client_;
};

TEST_F(TokensTest, Document_ComesInParts_AndIsTheWhole) {
  const int64_t tokens = 2 * Engine::kMostTokens + 17;
  Start(tokens);
  const auto all = client_->Tokens("report", ContentId());
  CARREL_ASSERT_OK(all);
  EXPECT_EQ(*all, context_->token_ids());
  for (const auto& [begin, count] : {std::pair{int64_t{0}, Engine::kMostTokens},
                                     {int64_t{5}, Engine::kMostTokens},
                                     {tokens - 3, int64_t{3}},
                                     {tokens, int64_t{0}}}) {
    v1::TokensResponse part;
    ASSERT_TRUE(Ask(begin, "", part).ok());
    EXPECT_EQ(part.tokens(), tokens);
    EXPECT_EQ(part.content_id(), ContentId());
    const auto* first = reinterpret_cast<const char*>(context_->token_ids().data() + begin);
    EXPECT_EQ(part.token_ids(), std::string(first, static_cast<size_t>(count) * sizeof(TokenId)));
  }
}

TEST_F(TokensTest, BadRequests_NameValueAndBound) {
  Start(700);
  v1::TokensResponse part;
  for (const int64_t begin : {int64_t{-1}, int64_t{701}, int64_t{1} << 62}) {
    const grpc::Status status = Ask(begin, "", part);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(status.error_message(),
              absl::StrCat("tokens of context report: begin=", begin, ", must be 0 .. 700"));
  }
  EXPECT_EQ(Ask(0, "12", part).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(client_->Tokens("none", ""), StatusIs(StatusCode::kNotFound, "none"));
}

// What was read belongs to what is open: a context that took its name meanwhile is another one.
TEST_F(TokensTest, AnotherContent_IsRefused) {
  Start(700);
  const std::string before = ContentId();
  CARREL_EXPECT_OK(client_->Tokens("report", before.substr(0, 12)));
  CARREL_ASSERT_OK(client_->Delete("report"));
  RandomContextSpec spec = context_->spec();
  spec.seed += 1;
  const RandomContext other(spec);
  CARREL_ASSERT_OK(other.Publish(engine_->store(), folder_, ContextId::Random()));
  EXPECT_THAT(client_->Tokens("report", before),
              StatusIs(StatusCode::kFailedPrecondition, "wanted is " + before));
  EXPECT_EQ(*client_->Tokens("report", ""), other.token_ids());
}

TEST_F(TokensTest, ADamagedDocument_IsDataLoss) {
  Start(700);
  const absl::string_view bytes(reinterpret_cast<const char*>(context_->token_ids().data()),
                                context_->token_ids().size() * sizeof(TokenId));
  ASSERT_TRUE(FlipBitOf(folder_ + "/store", std::string(bytes)));
  EXPECT_THAT(client_->Tokens("report", ""), StatusIs(StatusCode::kDataLoss, "token ids"));
}

}  // namespace
}  // namespace carrel::kvstore
