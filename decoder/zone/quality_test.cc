#include "decoder/zone/quality.h"

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

constexpr AttentionShape kShape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 2};

Partial Of(std::vector<float> out, std::vector<float> lse) {
  Partial partial;
  partial.out = std::move(out);
  partial.lse = std::move(lse);
  return partial;
}

TEST(AddOutputErrorsTest, ZoneWithEveryRow_IsZero) {
  const Partial window = Of({1, 2, 3, 4}, {0.5f, -1}), zone = Of({5, 6, 7, 8}, {1, 2});
  Mean error;
  AddOutputErrors(window, zone, zone, 1, kShape, error);
  EXPECT_EQ(error.count, 1);
  EXPECT_EQ(error.value(), 0);
}

// Equal lse: the merge is the mean. Token 0: dense (2, 0, 2, 0), seen (2, 0, 0, 0). Token 1: no
// rows anywhere.
TEST(AddOutputErrorsTest, EachToken_IsRelativeToTheNormOfItsHeadsTogether) {
  const float none = -INFINITY;
  const Partial window = Of({0, 0, 0, 0, 0, 0, 0, 0}, {none, 1, none, none});
  const Partial dense = Of({2, 0, 4, 0, 0, 0, 0, 0}, {0, 1, none, none});
  const Partial seen = Of({2, 0, 0, 0, 0, 0, 0, 0}, {0, none, none, none});
  Mean error;
  AddOutputErrors(window, seen, dense, 2, kShape, error);
  EXPECT_EQ(error.count, 2);
  EXPECT_NEAR(error.sum, std::sqrt(4.0 / 8.0), 1e-6);
}

TEST(ThresholdTest, NoSamples_TrustNothing) {
  EXPECT_EQ(Threshold().value(0.9), Threshold::kNever);
}

TEST(ThresholdTest, LeastCosineWhoseSamplesReachTheWantedMean_IsTheThreshold) {
  Threshold threshold;
  threshold.Add(0.99, 1.0);
  threshold.Add(0.95, 0.9);
  threshold.Add(0.90, 0.5);
  EXPECT_EQ(threshold.value(0.95), 0.95);
  EXPECT_EQ(threshold.value(0.75), 0.90);
  EXPECT_EQ(threshold.value(1.0), 0.99);
  threshold.Add(0.80, 1.0);  // the mean of all four is 0.85
  EXPECT_EQ(threshold.value(0.95), 0.95);
}

TEST(ThresholdTest, NeverGoodEnough_TrustsNothing) {
  Threshold threshold;
  threshold.Add(0.99, 0.2);
  EXPECT_EQ(threshold.value(0.9), Threshold::kNever);
}

TEST(ThresholdTest, MoreDemanding_IsNeverLower) {
  std::mt19937_64 rng(TestSeed());
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int round = 0; round < 50; ++round) {
    Threshold a, b;
    for (int i = 0; i < 30; ++i) {
      const double cosine = uniform(rng), hit_rate = uniform(rng);
      a.Add(cosine, hit_rate);
      b.Add(cosine, hit_rate);
    }
    EXPECT_LE(a.value(0.5), b.value(0.7));
  }
}

}  // namespace
}  // namespace carrel::decoder
