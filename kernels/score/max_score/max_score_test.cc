#include "kernels/score/max_score/max_score.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(MaxScoreTest);

TEST_P(MaxScoreTest, AnyShape_EqualsReference) {
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t queries = Below(trial % 4 == 0 ? 300 : 40), dim = 1 + Below(130);
    const int64_t keys = Below(200);
    const std::vector<float> q = RandomNormal(rng_, queries * dim, 3),
                             k = RandomNormal(rng_, keys * dim);
    const float poison = 7e30f;  // the float behind the last must not change
    std::vector<float> out(static_cast<size_t>(keys) + 1, poison), expected(out);
    MaxScore(QueryPanels(q.data(), queries, dim), k.data(), keys, out.data());
    RefMaxScore(q.data(), queries, dim, k.data(), keys, expected.data());
    EXPECT_EQ(out.back(), poison);
    for (int64_t j = 0; j < keys; ++j) {
      const size_t i = static_cast<size_t>(j);
      if (queries == 0) {
        ASSERT_EQ(out[i], -INFINITY);
      } else {
        ASSERT_NEAR(out[i], expected[i], 1e-4 * (1 + std::abs(expected[i]))) << queries << " " << j;
      }
    }
  }
}

}  // namespace
}  // namespace carrel::kernels
