#include "kernels/attention/window_attention/window_attention.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(WindowAttentionTest);

void ExpectMatchesReference(std::mt19937_64& rng, int64_t group, int64_t rows, int64_t dim,
                            float sigma, double tolerance) {
  SCOPED_TRACE(absl::StrCat("group ", group, " rows ", rows, " head_dim ", dim, " sigma ", sigma));
  const std::vector<float> q = RandomNormal(rng, group * dim, sigma);
  const std::vector<float> k = RandomNormal(rng, rows * dim), v = RandomNormal(rng, rows * dim);
  GuardedFloats out(group * dim), lse(group), expected(group * dim), expected_lse(group);
  GuardedFloats scratch(group * rows);
  WindowAttentionParams params{.q = q.data(),
                               .group = group,
                               .k = k.data(),
                               .v = v.data(),
                               .rows = rows,
                               .head_dim = dim,
                               .scale = 0.125f,
                               .out = out.data(),
                               .lse = lse.data()};
  WindowAttention(params, scratch.data());
  params.out = expected.data();
  params.lse = expected_lse.data();
  RefWindowAttention(params);
  ExpectAverageNear(out.span(), expected.span(), tolerance);
  ExpectLseNear(lse.span(), expected_lse.span(), tolerance);

  // Rows of bf16 give the bits of the same numbers in f32, and a query alone those of the group.
  std::vector<uint16_t> half_k(k.size()), half_v(v.size());
  FloatToBf16(k, half_k.data());
  FloatToBf16(v, half_v.data());
  std::vector<float> wide_k(k.size()), wide_v(v.size());
  Bf16ToFloat(half_k, wide_k.data());
  Bf16ToFloat(half_v, wide_v.data());
  params.k = wide_k.data();
  params.v = wide_v.data();
  WindowAttention(params, scratch.data());
  params.k = half_k.data();
  params.v = half_v.data();
  params.bf16 = true;
  GuardedFloats alone(dim), alone_lse(1);
  params.out = alone.data();
  params.lse = alone_lse.data();
  params.group = 1;
  for (int64_t h = 0; h < group; ++h) {
    params.q = q.data() + h * dim;
    WindowAttention(params, scratch.data());
    for (int64_t c = 0; c < dim; ++c) {
      ASSERT_EQ(alone.data()[c], expected.data()[h * dim + c]) << "query " << h << " column " << c;
    }
    ASSERT_EQ(alone_lse.data()[0], expected_lse.data()[h]) << "query " << h;
  }
  params.q = q.data();
  params.group = group;
  params.out = out.data();
  params.lse = lse.data();
  WindowAttention(params, scratch.data());
  params.out = expected.data();
  params.lse = expected_lse.data();
  RefWindowAttention(params);
  ExpectAverageNear(out.span(), expected.span(), tolerance);
  ExpectLseNear(lse.span(), expected_lse.span(), tolerance);
}

TEST_P(WindowAttentionTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 120; ++trial) {
    const int64_t group = 1 + Below(trial % 10 == 0 ? 40 : 8);
    const int64_t rows = 1 + Below(trial % 8 == 0 ? 1000 : 30);
    const int64_t dim = trial % 3 == 0 ? 64 : 2 * (1 + Below(140));
    ExpectMatchesReference(rng_, group, rows, dim, 1.0f, 3e-6);
  }
}

TEST_P(WindowAttentionTest, PeakedLogits_MatchReference) {
  // Scores of magnitude m carry an error of m * 2^-24 and more into the weights.
  for (int64_t trial = 0; trial < 20; ++trial) {
    ExpectMatchesReference(rng_, 4, 1 + Below(600), 64, 100.0f, 3e-4);
  }
}

TEST_P(WindowAttentionTest, LogitsNear1e4Below_AllAlike_AveragesRows) {
  const int64_t rows = 90, dim = 64;
  const std::vector<float> q(dim, 1.0f), k(rows * dim, -1250.0f);
  const std::vector<float> v = RandomNormal(rng_, rows * dim);
  GuardedFloats out(dim), lse(1), scratch(rows);
  WindowAttention({.q = q.data(),
                   .group = 1,
                   .k = k.data(),
                   .v = v.data(),
                   .rows = rows,
                   .head_dim = dim,
                   .scale = 0.125f,
                   .out = out.data(),
                   .lse = lse.data()},
                  scratch.data());
  std::vector<float> mean(dim);
  for (int64_t i = 0; i < rows * dim; ++i) mean[i % dim] += v[i] / static_cast<float>(rows);
  ExpectAverageNear(out.span(), mean);
  EXPECT_NEAR(lse.data()[0], -1e4 + std::log(90.0), 1e-3);
}

TEST_P(WindowAttentionTest, NoRows_OutZero_LseMinusInfinity) {
  const std::vector<float> q = RandomNormal(rng_, 2 * 64);
  GuardedFloats out(2 * 64), lse(2);
  WindowAttention({.q = q.data(), .group = 2, .head_dim = 64, .out = out.data(), .lse = lse.data()},
                  nullptr);
  for (float x : out.span()) EXPECT_EQ(x, 0.0f);
  for (float x : lse.span()) EXPECT_EQ(x, -INFINITY);
}

}  // namespace
}  // namespace carrel::kernels
