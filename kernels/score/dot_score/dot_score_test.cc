#include "kernels/score/dot_score/dot_score.h"

#include "common/thread_pool.h"
#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST_WITH_AMX(DotScoreTest);

TEST_P(DotScoreTest, Rows_RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 120; ++trial) {
    const int64_t group = 1 + Below(trial % 10 == 0 ? 200 : 8);
    const int64_t dim = trial % 3 == 0 ? 32 * (1 + Below(8)) : 2 * (1 + Below(100));
    const int64_t rows = Below(trial % 7 == 0 ? 300 : 10), stride = rows + Below(3);
    SCOPED_TRACE(absl::StrCat("group ", group, " head_dim ", dim, " rows ", rows));
    const std::vector<float> q = RandomNormal(rng_, group * dim);
    const Bf16Rows k(rng_, rows, dim, true);
    GuardedFloats out(group * stride);
    std::vector<float> expected = out.vector();
    DotScoreRows(q.data(), group, dim, k.rows(), rows, 0.3f, out.data(), stride);
    RefDotScoreRows(q.data(), group, dim, k.rows(), rows, 0.3f, expected.data(), stride);
    // What lies between the rows of scores must stay poisoned: NaN on both sides.
    ExpectNear(out.span(), expected, 0.3 * Norm(q) * k.norm());
  }
}

TEST_P(DotScoreTest, Contiguous_SplitAnywhere_SameBitsAsScatteredRows) {
  for (int64_t trial = 0; trial < 40; ++trial) {
    const int64_t group = 1 + Below(trial % 5 == 0 ? 100 : 8), rows = 1 + Below(100);
    const int64_t dim = trial % 2 == 0 ? 64 : 2 * (1 + Below(70));
    SCOPED_TRACE(absl::StrCat("group ", group, " head_dim ", dim, " rows ", rows));
    const std::vector<float> q = RandomNormal(rng_, group * dim);
    const Bf16Rows k(rng_, rows, dim, false);
    GuardedFloats whole(group * rows), split(group * rows);
    DotScoreRows(q.data(), group, dim, k.rows(), rows, 0.125f, whole.data(), rows);
    const int64_t cut = Below(rows + 1);
    DotScore(q.data(), group, dim, k.data(), cut, 0.125f, split.data(), rows);
    DotScore(q.data(), group, dim, static_cast<const uint8_t*>(k.data()) + 2 * cut * dim,
             rows - cut, 0.125f, split.data() + cut, rows);
    EXPECT_TRUE(SameBits(whole.span(), split.span()));
  }
}

TEST_P(DotScoreTest, Rows_SharedByThreads_SameBits) {
  ThreadPool pool(3);
  for (int64_t trial = 0; trial < 10; ++trial) {
    const int64_t group = 1 + Below(8), rows = 1 + Below(1500), dim = trial % 2 == 0 ? 64 : 70;
    const std::vector<float> q = RandomNormal(rng_, group * dim);
    const Bf16Rows k(rng_, rows, dim, true);
    GuardedFloats alone(group * rows), shared(group * rows);
    DotScoreRows(q.data(), group, dim, k.rows(), rows, 0.125f, alone.data(), rows);
    DotScoreRows(q.data(), group, dim, k.rows(), rows, 0.125f, shared.data(), rows, &pool);
    EXPECT_TRUE(SameBits(alone.span(), shared.span()));
  }
}

TEST_P(DotScoreTest, Queries_AnyOthersBesideThem_SameBits) {
  for (int64_t trial = 0; trial < 20; ++trial) {
    const int64_t group = 2 + Below(100), dim = 64, rows = 1 + Below(60);
    SCOPED_TRACE(absl::StrCat("group ", group, " rows ", rows));
    const std::vector<float> q = RandomNormal(rng_, group * dim);
    const Bf16Rows k(rng_, rows, dim, false);
    GuardedFloats whole(group * rows), alone(rows);
    DotScore(q.data(), group, dim, k.data(), rows, 0.125f, whole.data(), rows);
    const int64_t h = Below(group);
    DotScore(q.data() + h * dim, 1, dim, k.data(), rows, 0.125f, alone.data(), rows);
    EXPECT_TRUE(SameBits(whole.span().subspan(h * rows, rows), alone.span()));
  }
}

TEST_P(DotScoreTest, NoRows_AnyPointer_WritesNothing) {
  const std::vector<float> q = RandomNormal(rng_, 128);
  GuardedFloats out(1);
  DotScore(q.data(), 2, 64, nullptr, 0, 1.0f, out.data(), 0);
  DotScoreRows(q.data(), 2, 64, nullptr, 0, 1.0f, out.data(), 0);
  EXPECT_TRUE(out.Untouched(0));
}

TEST_P(DotScoreTest, LargeLogits_PeakedAndNegative_MatchReference) {
  const int64_t dim = 128, rows = 33;
  const std::vector<float> q = RandomNormal(rng_, dim, 300.0f);
  const Bf16Rows k(rng_, rows, dim, true, 30.0f);
  GuardedFloats out(rows), expected(rows);
  DotScoreRows(q.data(), 1, dim, k.rows(), rows, 0.1f, out.data(), rows);
  RefDotScoreRows(q.data(), 1, dim, k.rows(), rows, 0.1f, expected.data(), rows);
  ExpectNear(out.span(), expected.span(), 0.1 * Norm(q) * k.norm());
}

TEST_P(DotScoreTest, Pairs_EveryLength_MatchReference) {
  for (int64_t dim = 0; dim <= 200; ++dim) {
    const std::vector<float> q = RandomNormal(rng_, dim);
    const Bf16Rows a(rng_, 1, dim, false), b(rng_, 1, dim, false);
    std::vector<float> widened(static_cast<size_t>(dim));
    WidenToFloat(DType::kBf16, a.data(), dim, widened.data());
    float expected_query = 0, expected_pair = 0;
    RefDotScoreRows(q.data(), 1, dim, b.rows(), 1, 1.0f, &expected_query, 1);
    RefDotScoreRows(widened.data(), 1, dim, b.rows(), 1, 1.0f, &expected_pair, 1);
    SCOPED_TRACE(absl::StrCat("head_dim ", dim));
    ExpectNear({DotF32Bf16(q.data(), b.data(), dim)}, {expected_query}, Norm(q) * b.norm());
    ExpectNear({DotBf16(a.data(), b.data(), dim)}, {expected_pair}, a.norm() * b.norm());
  }
}

}  // namespace
}  // namespace carrel::kernels
