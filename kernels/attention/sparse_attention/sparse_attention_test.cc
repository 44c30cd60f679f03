#include "kernels/attention/sparse_attention/sparse_attention.h"

#include "kernels/attention/sparse_attention/sparse_spans.h"
#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(SparseAttentionTest);

constexpr double kTolerance = 3e-6;

// Runs both versions on the same input; given scores are computed by the reference.
void ExpectMatchesReference(std::mt19937_64& rng, int64_t group, int64_t rows, int64_t dim,
                            float sigma, bool given) {
  SCOPED_TRACE(absl::StrCat("group ", group, " rows ", rows, " head_dim ", dim, " sigma ", sigma,
                            " given ", given));
  const std::vector<float> q = RandomNormal(rng, group * dim, sigma);
  const Bf16Rows k(rng, rows, dim, true), v(rng, rows, dim, true);
  GuardedFloats scores(group * rows), out(group * dim), lse(group);
  GuardedFloats expected_scores(group * rows), expected(group * dim), expected_lse(group);
  SparseAttentionParams params{.q = q.data(),
                               .group = group,
                               .k = k.rows(),
                               .v = v.rows(),
                               .rows = rows,
                               .head_dim = dim,
                               .scale = 0.125f,
                               .scores = expected_scores.data(),
                               .out = expected.data(),
                               .lse = expected_lse.data()};
  RefSparseAttention(params);
  params.scores = scores.data();
  params.out = out.data();
  params.lse = lse.data();
  if (given) {
    std::copy_n(expected_scores.data(), group * rows, scores.data());
    params.k = nullptr;
    params.q = nullptr;
  }
  SparseAttention(params);
  ExpectNear(scores.span(), expected_scores.span(), 0.125 * Norm(q) * k.norm());
  // A score of magnitude m has an error of m * 2^-24 and more: it becomes the weight's.
  const double tolerance = given ? kTolerance : kTolerance * std::max(1.0f, sigma);
  ExpectAverageNear(out.span(), expected.span(), tolerance);
  ExpectLseNear(lse.span(), expected_lse.span(), tolerance);
  if (given) {
    EXPECT_TRUE(SameBits(scores.span(), expected_scores.span())) << "given scores were written";
  }
}

TEST_P(SparseAttentionTest, RandomShapes_ComputedAndGivenScores_MatchReference) {
  for (int64_t trial = 0; trial < 120; ++trial) {
    const int64_t group = 1 + Below(trial % 10 == 0 ? 40 : 8);
    const int64_t rows = 1 + Below(trial % 8 == 0 ? 1000 : 30);
    const int64_t dim = trial % 3 == 0 ? 64 : 2 * (1 + Below(140));
    ExpectMatchesReference(rng_, group, rows, dim, 1.0f, trial % 2 == 0);
  }
}

TEST_P(SparseAttentionTest, HeadsTogether_EachHasTheBitsItHasAlone) {
  const int64_t rows = 100;
  for (int64_t group = 1; group <= 9; ++group) {
    const int64_t dim = 1 + Below(200);
    SCOPED_TRACE(absl::StrCat("group ", group, " head_dim ", dim));
    const std::vector<float> q = RandomNormal(rng_, group * dim);
    const Bf16Rows k(rng_, rows, dim, true), v(rng_, rows, dim, true);
    GuardedFloats scores(group * rows), out(group * dim), lse(group);
    SparseAttentionParams params{.q = q.data(),
                                 .group = group,
                                 .k = k.rows(),
                                 .v = v.rows(),
                                 .rows = rows,
                                 .head_dim = dim,
                                 .scale = 0.125f,
                                 .scores = scores.data(),
                                 .out = out.data(),
                                 .lse = lse.data()};
    SparseAttention(params);
    params.group = 1;
    for (int64_t h = 0; h < group; ++h) {
      GuardedFloats alone(dim), alone_scores(rows), alone_lse(1);
      params.q = q.data() + h * dim;
      params.scores = alone_scores.data();
      params.out = alone.data();
      params.lse = alone_lse.data();
      SparseAttention(params);
      EXPECT_TRUE(SameBits(alone.span(), out.span().subspan(h * dim, dim)));
      EXPECT_TRUE(SameBits(alone_scores.span(), scores.span().subspan(h * rows, rows)));
      EXPECT_EQ(alone_lse.span()[0], lse.span()[h]);
    }
  }
}

TEST_P(SparseAttentionTest, PeakedLogits_MatchReference) {
  for (int64_t trial = 0; trial < 20; ++trial) {
    ExpectMatchesReference(rng_, 4, 1 + Below(600), 64, 100.0f, trial % 2 == 0);
  }
}

TEST_P(SparseAttentionTest, LogitsNear1e4Below_GivenScores_MatchReference) {
  const int64_t rows = 300, dim = 64;
  const Bf16Rows v(rng_, rows, dim, true);
  std::vector<float> scores = RandomNormal(rng_, rows);
  for (float& x : scores) x -= 1e4f;
  scores[17] = -3e4f;
  scores[18] = -INFINITY;
  GuardedFloats out(dim), expected(dim), lse(1), expected_lse(1);
  SparseAttentionParams params{.group = 1,
                               .v = v.rows(),
                               .rows = rows,
                               .head_dim = dim,
                               .scores = scores.data(),
                               .out = out.data(),
                               .lse = lse.data()};
  SparseAttention(params);
  params.out = expected.data();
  params.lse = expected_lse.data();
  RefSparseAttention(params);
  ExpectAverageNear(out.span(), expected.span());
  ExpectLseNear(lse.span(), expected_lse.span(), 1e-7);
}

TEST_P(SparseAttentionTest, NoRows_OutZero_LseMinusInfinity) {
  const std::vector<float> q = RandomNormal(rng_, 3 * 66);
  GuardedFloats out(3 * 66), lse(3), scores(0);
  SparseAttention({.q = q.data(),
                   .group = 3,
                   .head_dim = 66,
                   .scale = 1.0f,
                   .scores = scores.data(),
                   .out = out.data(),
                   .lse = lse.data()});
  for (float x : out.span()) EXPECT_EQ(x, 0.0f);
  for (float x : lse.span()) EXPECT_EQ(x, -INFINITY);
}

TEST_P(SparseAttentionTest, OnlyMinusInfinityScores_CountAsEmpty) {
  const Bf16Rows v(rng_, 5, 64, false);
  std::vector<float> scores(5, -INFINITY);
  GuardedFloats out(64), lse(1);
  SparseAttention({.group = 1,
                   .v = v.rows(),
                   .rows = 5,
                   .head_dim = 64,
                   .scores = scores.data(),
                   .out = out.data(),
                   .lse = lse.data()});
  for (float x : out.span()) EXPECT_EQ(x, 0.0f);
  EXPECT_EQ(lse.data()[0], -INFINITY);
}

TEST_P(SparseAttentionTest, OneRow_WeightExactlyOne) {
  const Bf16Rows v(rng_, 1, 70, false);
  std::vector<float> row(70);
  WidenToFloat(DType::kBf16, v.data(), 70, row.data());
  float score = 12.5f;
  GuardedFloats out(70), lse(1);
  SparseAttention({.group = 1,
                   .v = v.rows(),
                   .rows = 1,
                   .head_dim = 70,
                   .scores = &score,
                   .out = out.data(),
                   .lse = lse.data()});
  EXPECT_TRUE(SameBits(out.span(), row));
  EXPECT_EQ(lse.data()[0], score);
}

// In any order; what few rows are, one span has with the bits of the whole.
TEST_P(SparseAttentionTest, Spans_MergedInOrder_MatchReference) {
  for (const int64_t rows :
       {int64_t{0}, int64_t{1}, int64_t{128}, int64_t{129}, 200 + Below(4000)}) {
    for (const bool given : {false, true}) {
      const int64_t group = 1 + Below(9), dim = 1 + Below(140);
      SCOPED_TRACE(absl::StrCat("group ", group, " rows ", rows, " head_dim ", dim));
      const std::vector<float> q = RandomNormal(rng_, group * dim);
      const Bf16Rows k(rng_, rows, dim, true), v(rng_, rows, dim, true);
      GuardedFloats scores(group * rows), out(group * dim), lse(group);
      GuardedFloats expected_scores(group * rows), expected(group * dim), expected_lse(group);
      SparseAttentionParams params{.q = q.data(),
                                   .group = group,
                                   .k = k.rows(),
                                   .v = v.rows(),
                                   .rows = rows,
                                   .head_dim = dim,
                                   .scale = 0.125f,
                                   .scores = expected_scores.data(),
                                   .out = expected.data(),
                                   .lse = expected_lse.data()};
      RefSparseAttention(params);
      if (rows <= 128) SparseAttention(params);
      params.scores = scores.data();
      params.out = out.data();
      params.lse = lse.data();
      if (given) {
        std::copy_n(expected_scores.data(), group * rows, scores.data());
        params.k = nullptr;
      }
      GuardedFloats states(SparseSpanFloats(params));
      const int64_t spans = SparseSpans(rows);
      EXPECT_EQ(SparseSpanBegin(rows, 0), 0);
      EXPECT_EQ(SparseSpanBegin(rows, spans), rows);
      for (int64_t span = spans - 1; span >= 0; --span) {
        SparseAttentionSpan(params, span, states.data());
      }
      MergeSparseSpans(params, states.data());
      ExpectAverageNear(out.span(), expected.span(), kTolerance);
      ExpectLseNear(lse.span(), expected_lse.span(), kTolerance);
      if (spans > 1) continue;
      EXPECT_TRUE(SameBits(out.span(), expected.span()));
      EXPECT_TRUE(SameBits(lse.span(), expected_lse.span()));
    }
  }
}

}  // namespace
}  // namespace carrel::kernels
