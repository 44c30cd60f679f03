#include "prefill/head_statistics.h"

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

TEST(HeadStatisticsTest, UniformAttention_HasLogNEntropy) {
  const LayerRows rows = OneSample(std::vector<float>(200, 1.0f), {1, 1, 0, 0});
  const std::vector<HeadStatistics> heads = ComputeHeadStatistics(rows, AttentionShape{1, 2, 1, 2}, 64);
  ASSERT_EQ(heads.size(), 2u);
  EXPECT_NEAR(heads[0].entropy_nats, std::log(100.0), 1e-5);
  EXPECT_EQ(heads[0].keys_for_75_mass, 75);
  EXPECT_NEAR(heads[1].entropy_nats, std::log(100.0), 1e-5);
  EXPECT_EQ(heads[1].samples, 1);
}

TEST(HeadStatisticsTest, OneKeyTakesAll_HasNoEntropy) {
  std::vector<float> keys(200, 0.0f);
  keys[60] = 100;
  const std::vector<HeadStatistics> heads = ComputeHeadStatistics(OneSample(keys, {10, 0, 0, 1}), AttentionShape{1, 2, 1, 2}, 64);
  EXPECT_NEAR(heads[0].entropy_nats, 0, 1e-6);
  EXPECT_EQ(heads[0].keys_for_75_mass, 1);
  EXPECT_NEAR(heads[1].entropy_nats, std::log(100.0), 1e-5);
}

}  // namespace
}  // namespace carrel::prefill
