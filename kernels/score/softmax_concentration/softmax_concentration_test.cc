#include "kernels/score/softmax_concentration/softmax_concentration.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(SoftmaxConcentrationTest);

Concentration Of(const std::vector<float>& scores, double share, bool reference = false) {
  const auto count = static_cast<int64_t>(scores.size());
  GuardedFloats scratch(count);
  return reference ? RefSoftmaxConcentration(scores.data(), count, share, scratch.data())
                   : SoftmaxConcentration(scores.data(), count, share, scratch.data());
}

TEST_P(SoftmaxConcentrationTest, RandomScores_EverySpreadAndShare_MatchReference) {
  for (int64_t trial = 0; trial < 200; ++trial) {
    const int64_t count = 1 + Below(trial % 4 == 0 ? 20000 : 600);
    const double shares[] = {0.01, 0.5, 0.75, 0.999};
    const double share = shares[Below(4)];
    const float spread = std::exp(std::uniform_real_distribution<float>(-5, 5)(rng_));
    std::vector<float> scores = RandomNormal(rng_, count);
    for (float& s : scores) s = spread * s + 100;
    // Ties: half of the trials know few different scores.
    if (trial % 2 == 0) {
      for (float& s : scores) s = spread * std::round(s / spread);
    }
    SCOPED_TRACE(absl::StrCat("count ", count, " share ", share, " spread ", spread));
    const Concentration found = Of(scores, share), expected = Of(scores, share, true);
    EXPECT_NEAR(found.entropy_nats, expected.entropy_nats,
                1e-5 * (1 + expected.entropy_nats + spread));
    EXPECT_NEAR(found.elements, expected.elements, 1 + 1e-5 * static_cast<double>(count));
  }
}

TEST_P(SoftmaxConcentrationTest, EqualScores_CountTheirShare) {
  for (const int64_t count : {1, 2, 16, 100, 4096, 30000}) {
    const Concentration found = Of(std::vector<float>(static_cast<size_t>(count), -3.0f), 0.75);
    EXPECT_NEAR(found.entropy_nats, std::log(static_cast<double>(count)), 1e-5);
    EXPECT_EQ(found.elements, (3 * count + 3) / 4);
  }
}

TEST_P(SoftmaxConcentrationTest, OneScoreTakesAll_IsAlone) {
  std::vector<float> scores(5000, -1e4f);
  scores[static_cast<size_t>(Below(5000))] = 20;
  const Concentration found = Of(scores, 0.75);
  EXPECT_NEAR(found.entropy_nats, 0, 1e-9);
  EXPECT_EQ(found.elements, 1);
}

TEST_P(SoftmaxConcentrationTest, NotANumber_IsSaidByTheEntropy) {
  std::vector<float> scores = RandomNormal(rng_, 300);
  scores[static_cast<size_t>(Below(300))] = INFINITY;
  const Concentration found = Of(scores, 0.75);
  EXPECT_TRUE(std::isnan(found.entropy_nats));
  EXPECT_GE(found.elements, 0);
  EXPECT_LE(found.elements, 300);
}

}  // namespace
}  // namespace carrel::kernels
