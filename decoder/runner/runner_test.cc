#include "decoder/runner/runner.h"

#include <numeric>

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

using testing::ElementsAre;

std::vector<std::vector<size_t>> Parts(const std::vector<int64_t>& lengths, int64_t most) {
  const std::vector<TokenId> tokens(1000);
  std::vector<Slice> batch(lengths.size());
  std::vector<size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = 0; i < lengths.size(); ++i) {
    batch[i].tokens = absl::MakeConstSpan(tokens).first(static_cast<size_t>(lengths[i]));
  }
  return PartsOf(batch, order, most);
}

TEST(PartsOfTest, APart_HasAsManyTokensAsKeepTheirBits) {
  EXPECT_THAT(Parts({1, 1, 1}, 32), ElementsAre(ElementsAre(0, 1, 2)));
  EXPECT_THAT(Parts({20, 12, 1}, 32), ElementsAre(ElementsAre(2, 1), ElementsAre(0)));
  EXPECT_THAT(Parts({1, 1}, 1), ElementsAre(ElementsAre(0), ElementsAre(1)));
  EXPECT_THAT(Parts({}, 32), testing::IsEmpty());
}

TEST(PartsOfTest, ALongerBlock_IsAPartOfItsOwn_AndPartsNoOthers) {
  EXPECT_THAT(Parts({1, 100, 1}, 32), ElementsAre(ElementsAre(0, 2), ElementsAre(1)));
  EXPECT_THAT(Parts({100, 1}, 32), ElementsAre(ElementsAre(1), ElementsAre(0)));
}

TEST(PartsOfTest, Answers_StayTogetherWhereverThePromptStands) {
  EXPECT_THAT(Parts({1, 1, 31, 1, 1}, 32), ElementsAre(ElementsAre(0, 1, 3, 4), ElementsAre(2)));
  EXPECT_THAT(Parts({28, 1, 1, 1, 1}, 32), ElementsAre(ElementsAre(1, 2, 3, 4, 0)));
}

TEST(RunnerKeyTest, CopiesOfACheckpoint_ShareARunner_AnotherModelDoesNot) {
  model::Checkpoint checkpoint;
  checkpoint.config.shape = {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
  checkpoint.config.rope.theta = 10000;
  model::Checkpoint other = checkpoint;
  other.fingerprint.emplace_back("weights", "of the context");  // as who opens it presents itself
  EXPECT_EQ(RunnerKey(other), RunnerKey(checkpoint));
  other.config.rope.theta = 500000;
  EXPECT_NE(RunnerKey(other), RunnerKey(checkpoint));
}

}  // namespace
}  // namespace carrel::decoder
