#include "prefill/head_statistics.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "common/dtype.h"
#include "common/test_util.h"

namespace carrel::prefill {
namespace {

// One KV head of dimension 2, two q heads, 100 keys; the only sample stands at the last.
LayerRows OneSample(std::vector<float> keys, std::vector<float> queries) {
  LayerRows rows;
  rows.k.resize(1);
  rows.k[0].resize(keys.size());
  FloatToBf16(keys, rows.k[0].data());
  rows.queries = {std::move(queries)};
  rows.sample_positions = {static_cast<Position>(keys.size()) / 2 - 1};
  return rows;
}

// Of all KV heads: one entry per q head, in order.
std::vector<HeadStatistics> ComputeHeadStatistics(const LayerRows& rows,
                                                  const AttentionShape& shape,
                                                  int64_t max_samples) {
  std::vector<HeadStatistics> all(static_cast<size_t>(shape.q_heads));
  for (KvHead head(0); head.value() < shape.kv_heads; head = head.next()) {
    DescribeHead(rows, shape, head, max_samples, &all[head.value() * shape.group()]);
  }
  return all;
}

TEST(HeadStatisticsTest, UniformAttention_HasLogNEntropy) {
  const LayerRows rows = OneSample(std::vector<float>(200, 1.0f), {1, 1, 0, 0});
  const std::vector<HeadStatistics> heads =
      ComputeHeadStatistics(rows, AttentionShape{1, 2, 1, 2}, 64);
  ASSERT_EQ(heads.size(), 2u);
  EXPECT_NEAR(heads[0].entropy_nats, std::log(100.0), 1e-5);
  EXPECT_EQ(heads[0].keys_for_75_mass, 75);
  EXPECT_NEAR(heads[1].entropy_nats, std::log(100.0), 1e-5);
  EXPECT_EQ(heads[1].samples, 1);
}

TEST(HeadStatisticsTest, OneKeyTakesAll_HasNoEntropy) {
  std::vector<float> keys(200, 0.0f);
  keys[60] = 100;
  const std::vector<HeadStatistics> heads =
      ComputeHeadStatistics(OneSample(keys, {10, 0, 0, 1}), AttentionShape{1, 2, 1, 2}, 64);
  EXPECT_NEAR(heads[0].entropy_nats, 0, 1e-6);
  EXPECT_EQ(heads[0].keys_for_75_mass, 1);
  EXPECT_NEAR(heads[1].entropy_nats, std::log(100.0), 1e-5);
}

TEST(HeadStatisticsTest, RandomScores_AgreeWithSortingAll) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 rng(seed);
  for (int round = 0; round < 50; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << " round " << round);
    const int64_t keys = std::uniform_int_distribution<int64_t>(1, 3000)(rng);
    std::normal_distribution<float> normal(
        0, std::exp(std::uniform_real_distribution<float>(-3, 4)(rng)));
    std::vector<float> rows;
    for (int64_t i = 0; i < 2 * keys; ++i) rows.push_back(normal(rng));
    const LayerRows layer = OneSample(rows, {1, 0, 0.5f, -1});
    const std::vector<HeadStatistics> heads =
        ComputeHeadStatistics(layer, AttentionShape{1, 2, 1, 2}, 64);
    std::vector<float> wide(rows.size());
    WidenToFloat(DType::kBf16, layer.k[0].data(), static_cast<int64_t>(wide.size()), wide.data());
    for (int h = 0; h < 2; ++h) {
      std::vector<double> weights;
      for (int64_t i = 0; i < keys; ++i) {
        const double score =
            (h == 0 ? wide[2 * i] : 0.5 * wide[2 * i] - wide[2 * i + 1]) / std::sqrt(2.0);
        weights.push_back(score);
      }
      std::sort(weights.begin(), weights.end(), std::greater<>());
      double sum = 0, mean = 0, carried = 0;
      const double max = weights[0];
      for (double& w : weights) {
        const double e = std::exp(w - max);
        mean += (w - max) * e;
        sum += e;
        w = e;
      }
      int64_t count = 0;
      while (carried < 0.75 * sum) carried += weights[count++];
      EXPECT_NEAR(heads[h].entropy_nats, std::log(sum) - mean / sum, 1e-3);
      EXPECT_NEAR(heads[h].keys_for_75_mass, count, 1);  // a sum on the edge may round either way
    }
  }
}

}  // namespace
}  // namespace carrel::prefill
