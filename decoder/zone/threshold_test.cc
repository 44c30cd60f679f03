#include "decoder/zone/threshold.h"

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

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
