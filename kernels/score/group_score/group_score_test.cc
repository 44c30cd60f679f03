#include "kernels/score/group_score/group_score.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(GroupScoreTest);

TEST_P(GroupScoreTest, GroupScore_RandomShapes_EqualsReference) {
  for (int64_t trial = 0; trial < 100; ++trial) {
    const int64_t group = 1 + Below(8), rows = Below(200), stride = rows + Below(4);
    const std::vector<float> scores = RandomNormal(rng_, group * stride + 1, 20.0f);
    const std::vector<float> base = RandomNormal(rng_, group, 5.0f);
    GuardedFloats out(rows), expected(rows);
    GroupScore(scores.data(), group, rows, stride, base.data(), out.data());
    RefGroupScore(scores.data(), group, rows, stride, base.data(), expected.data());
    EXPECT_TRUE(SameBits(out.span(), expected.span())) << "group " << group << " rows " << rows;
  }
}

TEST_P(GroupScoreTest, GroupScore_BaseIsLse_LogProbabilitiesAtMostZero) {
  const int64_t group = 4, rows = 1000;
  const std::vector<float> scores = RandomNormal(rng_, group * rows, 30.0f);
  std::vector<float> base;
  for (int64_t h = 0; h < group; ++h) base.push_back(LogSumExp(scores.data() + h * rows, rows));
  GuardedFloats out(rows);
  GroupScore(scores.data(), group, rows, rows, base.data(), out.data());
  for (int64_t j = 0; j < rows; ++j) EXPECT_LE(out.data()[j], 1e-4f);
}

TEST_P(GroupScoreTest, LogSumExp_RandomSizes_WithinOneMillionth) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t rows = 1 + Below(trial % 10 == 0 ? 100000 : 300);
    const float sigma = trial % 2 == 0 ? 1.0f : 40.0f;
    const std::vector<float> scores = RandomNormal(rng_, rows, sigma);
    const double expected = RefLogSumExp(scores.data(), rows);
    // 1e-6 of the sum, plus the rounding of the logarithm to float.
    EXPECT_NEAR(LogSumExp(scores.data(), rows), expected, 1e-6 + 6e-8 * std::abs(expected))
        << "rows " << rows << " sigma " << sigma;
  }
}

TEST_P(GroupScoreTest, LogSumExp_OfParts_IsThatOfAll) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t heads = 1 + Below(3), rows = Below(3000), length = 1 + Below(900);
    const int64_t parts = (rows + length - 1) / length;
    std::vector<float> scores = RandomNormal(rng_, heads * rows + 1, trial % 2 == 0 ? 1 : 40);
    // A part of nothing but -inf adds nothing.
    if (trial % 5 == 0) std::fill_n(scores.begin(), std::min(rows, length), -INFINITY);
    std::vector<LsePart> sums(static_cast<size_t>(parts * heads) + 1);
    for (int64_t i = 0; i < parts * heads; ++i) {
      const int64_t first = i / heads * length;
      sums[static_cast<size_t>(i)] =
          LsePartOf(scores.data() + i % heads * rows + first, std::min(length, rows - first));
    }
    for (int64_t h = 0; h < heads; ++h) {
      const double expected = RefLogSumExp(scores.data() + h * rows, rows);
      const float found = LogSumExp(&sums[static_cast<size_t>(h)], parts, heads);
      if (std::isinf(expected)) {
        EXPECT_EQ(found, expected);
      } else {
        EXPECT_NEAR(found, expected, 1e-6 + 6e-8 * std::abs(expected)) << "rows " << rows;
      }
    }
  }
}

TEST_P(GroupScoreTest, LogSumExp_Offset1e4_MovesWithIt) {
  std::vector<float> scores = RandomNormal(rng_, 77);
  for (float& x : scores) x = std::round(x * 64.0f) / 64.0f;  // exact under the offset
  const double before = RefLogSumExp(scores.data(), 77);
  for (float& x : scores) x -= 1e4f;
  EXPECT_NEAR(LogSumExp(scores.data(), 77), before - 1e4, 1e-3);
}

TEST_P(GroupScoreTest, LogSumExp_Edges_NeverNaN) {
  const float inf = INFINITY;
  EXPECT_EQ(LogSumExp(nullptr, 0), -inf);
  const std::vector<float> empty(40, -inf);
  EXPECT_EQ(LogSumExp(empty.data(), 40), -inf);
  std::vector<float> one(40, -inf);
  one[33] = 2.5f;
  EXPECT_EQ(LogSumExp(one.data(), 40), 2.5f);
}

}  // namespace
}  // namespace carrel::kernels
