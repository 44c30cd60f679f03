#include "common/histogram.h"

#include <algorithm>
#include <thread>
#include <vector>

#include "common/test_util.h"

namespace carrel {
namespace {

TEST(HistogramTest, Empty_IsZero) {
  const Histogram::Summary summary = Histogram().Summarise();
  EXPECT_EQ(summary.count, 0);
  EXPECT_EQ(summary.p99, 0);
}

TEST(HistogramTest, RandomDurations_QuantilesAreRightToABucket) {
  std::mt19937_64 rng(TestSeed());
  std::lognormal_distribution<double> draw(5, 2);
  Histogram histogram;
  std::vector<double> values;
  for (int i = 0; i < 5000; ++i) {
    values.push_back(draw(rng));
    histogram.Add(values.back());
  }
  std::sort(values.begin(), values.end());
  const Histogram::Summary summary = histogram.Summarise();
  EXPECT_EQ(summary.count, 5000);
  const auto expect = [&](double found, double share) {
    const double exact = values[static_cast<size_t>(share * 5000) - 1];
    EXPECT_GE(found, exact * 0.999);
    EXPECT_LE(found, std::max(exact * 1.2, 1.2)) << share;
  };
  expect(summary.p50, 0.5);
  expect(summary.p90, 0.9);
  expect(summary.p99, 0.99);
  EXPECT_NEAR(summary.max, values.back(), 1e-3 * values.back());
}

TEST(HistogramTest, ManyThreads_LoseNothing) {
  Histogram histogram;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1000; ++i) histogram.Add(t + 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Histogram::Summary summary = histogram.Summarise();
  EXPECT_EQ(summary.count, 4000);
  EXPECT_DOUBLE_EQ(summary.mean, 2.5);
  EXPECT_DOUBLE_EQ(summary.max, 4);
}

TEST(HistogramTest, Extremes_StayInRange) {
  Histogram histogram;
  for (const double us : {-1.0, 0.0, 1e-9, 1e15}) histogram.Add(us);
  EXPECT_EQ(histogram.Summarise().count, 4);
}

}  // namespace
}  // namespace carrel
