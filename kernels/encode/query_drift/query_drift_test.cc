#include "kernels/encode/query_drift/query_drift.h"

#include "kernels/layer/rope/rope.h"
#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(QueryDriftTest);

std::vector<float> InvFreq(int64_t head_dim) {
  std::vector<float> inv_freq;
  for (int64_t c = 0; c < head_dim / 2; ++c) {
    inv_freq.push_back(1.0f / std::pow(500000.0f, static_cast<float>(2 * c) / head_dim));
  }
  return inv_freq;
}

TEST_P(QueryDriftTest, RandomBlocks_MatchReference) {
  for (int64_t trial = 0; trial < 40; ++trial) {
    const int64_t heads = 1 + Below(4), dim = 2 * (1 + Below(70)), width = heads * dim;
    const float newest = trial % 3 == 0 ? 0.0f : 0.2f;
    const std::vector<float> inv_freq = InvFreq(dim);
    std::vector<float> mean(width, 0.0f), expected = mean, scratch(2 * width);
    int64_t tokens = 0, expected_tokens = 0, position = Below(trial % 2 == 0 ? 100 : 1000000);
    for (const int64_t n : {Below(6), int64_t{1}, Below(6)}) {
      const std::vector<float> q = RandomNormal(rng_, n * width);
      const std::vector<float> predicted_q = RandomNormal(rng_, n * width);
      QueryDriftParams p;
      p.q = q.data();
      p.predicted_q = predicted_q.data();
      p.n = n;
      p.heads = heads;
      p.head_dim = dim;
      p.first_position = position;
      p.inv_freq = trial % 5 == 0 ? nullptr : inv_freq.data();
      p.newest = newest;
      p.mean = mean.data();
      p.tokens = &tokens;
      p.scratch = scratch.data();
      LearnQueryDrift(p);
      p.mean = expected.data();
      p.tokens = &expected_tokens;
      RefLearnQueryDrift(p);
      EXPECT_EQ(tokens, expected_tokens);
      EXPECT_LE(RelativeError(mean, expected), 1e-5);
      position += n;
    }
  }
}

TEST_P(QueryDriftTest, SameLackEverywhere_IsTheMean) {
  const int64_t heads = 3, dim = 32, width = heads * dim, n = 50, first = Below(100000);
  const std::vector<float> inv_freq = InvFreq(dim), lack = RandomNormal(rng_, width);
  const std::vector<float> predicted_q = RandomNormal(rng_, n * width);
  std::vector<float> q;
  for (int64_t i = 0; i < n; ++i) q.insert(q.end(), lack.begin(), lack.end());
  Rope(q.data(), n, heads, dim, first, inv_freq.data());
  for (size_t i = 0; i < q.size(); ++i) q[i] += predicted_q[i];
  for (const float newest : {0.0f, 0.2f}) {
    std::vector<float> mean(width, 0.0f), scratch(2 * width);
    int64_t tokens = 0;
    LearnQueryDrift({q.data(), predicted_q.data(), n, heads, dim, first, inv_freq.data(), newest,
                     mean.data(), &tokens, scratch.data()});
    EXPECT_EQ(tokens, n);
    EXPECT_LE(RelativeError(mean, lack), 1e-5);
  }
}

}  // namespace
}  // namespace carrel::kernels
