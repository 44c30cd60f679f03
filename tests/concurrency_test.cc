// Many decoders on one kvstore over a socket: each gets exactly the tokens that it gets alone.
#include <thread>

#include "common/test_util.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/server.h"
#include "kvstore/storage/store.h"
#include "tests/world.h"

namespace carrel {
namespace {

using decoder::Prefetch;
using decoder::Want;

decoder::RetrievalConfig ConfigOf(int64_t decoder) {
  decoder::RetrievalConfig config;
  config.want = static_cast<Want>(decoder % 3);
  config.prefetch = static_cast<Prefetch>(decoder / 3 % 3);
  config.top_k = 16 + 8 * (decoder % 5);
  config.dense_layers = static_cast<int32_t>(decoder % 3);
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
      CARREL_ASSERT_OK(testing_world::PrefillContext(folder_, std::string(kvstore::IndexKindName(kind)), *tokens, index));
    }
    questions_ = *testing_world::Questions("registry-512");
    questions_.resize(4);
  }

  // Decoder number i, from its own connection.
  std::vector<std::vector<TokenId>> Run(const std::string& address, int64_t i) {
    auto decoder = testing_world::EmbeddedDecoder::Connect(address, i % 2 == 0 ? "flat" : "hnsw", ConfigOf(i));
    CARREL_EXPECT_OK(decoder);
    if (!decoder.ok()) return {};
    const auto answers = testing_world::AnswerAll(*(*decoder)->operator->(), questions_);
    CARREL_EXPECT_OK(answers);
    return answers.ok() ? *answers : std::vector<std::vector<TokenId>>();
  }

  std::string folder_;
  std::vector<testing_world::Question> questions_;
};

TEST_F(ConcurrencyTest, TwoAndSixteenDecoders_GiveTheTokensOfEachAlone) {
  const auto store = kvstore::Store::Open(folder_, kvstore::StoreMode::kReadOnly);
  CARREL_ASSERT_OK(store);
