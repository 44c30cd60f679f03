// Many decoders on one kvstore over a socket: each gets exactly the tokens that it gets alone.
#include <thread>

#include "common/test_util.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/server.h"
#include "kvstore/storage/store.h"
#include "tests/world.h"

namespace carrel {
namespace {

using Answers = std::vector<std::vector<TokenId>>;

// Decoders differ in everything that a store sees.
decoder::RetrievalConfig ConfigOf(int64_t i) {
  decoder::RetrievalConfig config;
  config.want = static_cast<decoder::Want>(1 + i % 3);
  config.prefetch = static_cast<decoder::Prefetch>(i / 3 % 3);
  config.selection = select::TopK{16 + 8 * (i % 5)};
  config.dense_layers = static_cast<int32_t>(i % 3);
  return config;
}

class ConcurrencyTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = FreshTempDir();
    const auto tokens = testing_world::DocumentTokens("registry-512");
    CARREL_ASSERT_OK(tokens);
    for (const auto kind : {kvstore::IndexKind::kFlat, kvstore::IndexKind::kHnsw}) {
      kvstore::IndexParams index;
      index.kind = kind;
      CARREL_ASSERT_OK(testing_world::PrefillContext(
          folder_, std::string(kvstore::IndexKindName(kind)), *tokens, index));
    }
    questions_ = *testing_world::Questions("registry-512");
    questions_.resize(4);
    auto store = kvstore::Store::Open(folder_, kvstore::StoreMode::kReadOnly);
    CARREL_ASSERT_OK(store);
    auto engine = kvstore::Engine::Create(kvstore::EngineConfig(), *std::move(store));
    CARREL_ASSERT_OK(engine);
    engine_ = *std::move(engine);
    kvstore::ServerConfig config;
    config.listen = {"unix:" + folder_ + "/socket"};
    auto server = kvstore::Server::Start(config, engine_.get());
    CARREL_ASSERT_OK(server);
    server_ = *std::move(server);
  }

  // Decoder number i, over a connection of its own.
  Answers Run(int64_t i) {
    auto decoder = testing_world::EmbeddedDecoder::Connect(
        "unix:" + folder_ + "/socket", i % 2 == 0 ? "flat" : "hnsw", ConfigOf(i));
    CARREL_EXPECT_OK(decoder);
    if (!decoder.ok()) return {};
    const auto answers = testing_world::AnswerAll(*(*decoder)->operator->(), questions_);
    CARREL_EXPECT_OK(answers);
    return answers.ok() ? *answers : Answers();
  }

  std::string folder_;
  std::vector<testing_world::Question> questions_;
  std::unique_ptr<kvstore::Engine> engine_;
  std::unique_ptr<kvstore::Server> server_;
};

TEST_F(ConcurrencyTest, TwoAndSixteenDecoders_GiveTheTokensOfEachAlone) {
  constexpr int64_t kDecoders = 16;
  std::vector<Answers> alone(kDecoders);
  for (int64_t i = 0; i < kDecoders; ++i) alone[i] = Run(i);
  EXPECT_GT(alone[0].size(), 0u);
  for (const int64_t count : {int64_t{2}, kDecoders}) {
    std::vector<Answers> together(count);
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < count; ++i) threads.emplace_back([&, i] { together[i] = Run(i); });
    for (std::thread& thread : threads) thread.join();
    for (int64_t i = 0; i < count; ++i)
      EXPECT_EQ(together[i], alone[i]) << "decoder " << i << " of " << count;
  }
}

}  // namespace
}  // namespace carrel
