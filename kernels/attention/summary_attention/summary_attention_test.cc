#include "kernels/attention/summary_attention/summary_attention.h"

#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(SummaryAttentionTest);

struct Clusters {
  Clusters(std::mt19937_64& rng, int64_t count, int64_t dim)
      : keys(1 + count * dim), values(1 + count * dim) {
    std::uniform_int_distribution<int> byte(-127, 127);
    std::uniform_real_distribution<float> positive(0.001f, 0.02f);
    for (auto* bytes : {&keys, &values}) {
      for (int8_t& x : *bytes) x = static_cast<int8_t>(byte(rng));
    }
    for (int64_t c = 0; c < count; ++c) {
      key_scale.push_back(positive(rng));
      value_scale.push_back(positive(rng));
      spread.push_back(10 * positive(rng));
      counts.push_back(static_cast<float>(rng() % 60));
      rests.push_back(rng() % 4 == 0 ? 0 : counts.back());
    }
  }
  std::vector<int8_t> keys, values;  // from an odd address
  std::vector<float> key_scale, value_scale, spread, counts, rests;
};

TEST_P(SummaryAttentionTest, Scores_RandomShapes_MatchReference) {
  for (int trial = 0; trial < 80; ++trial) {
    const int64_t group = 1 + Below(trial % 10 == 0 ? 20 : 8);
    const int64_t dim = trial % 3 == 0 ? 128 : 1 + Below(200);
    const int64_t count = Below(trial % 7 == 0 ? 257 : 20);
    SCOPED_TRACE(absl::StrCat("group ", group, " head_dim ", dim, " clusters ", count));
    const std::vector<float> q = RandomNormal(rng_, group * dim);
    const Clusters clusters(rng_, count, dim);
    const int64_t rows = count == 0 || trial % 4 == 0 ? 0 : Below(200);
    std::vector<uint8_t> row_cluster;
    std::vector<float> left = clusters.counts;
    for (int64_t j = 0; j < rows; ++j) {
      const int64_t c = Below(count);
      if (left[c] == 0) continue;
      left[c] -= 1;
      row_cluster.push_back(static_cast<uint8_t>(c));
    }
    const int64_t stride = rows + Below(3);
    const std::vector<float> row_scores = RandomNormal(rng_, group * stride, 3);
    const std::vector<float> base = RandomNormal(rng_, group);
    GuardedFloats out(group * count), expected(group * count);
    SummaryScoreParams params{.q = q.data(),
                              .group = group,
                              .head_dim = dim,
                              .scale = 0.1f,
                              .keys = clusters.keys.data() + 1,
                              .key_scale = clusters.key_scale.data(),
                              .spread = clusters.spread.data(),
                              .share = 0.6f,
                              .clusters = count,
                              .row_cluster = row_cluster.data(),
                              .row_scores = row_scores.data(),
                              .row_score_stride = stride,
                              .rows = static_cast<int64_t>(row_cluster.size()),
                              .base = base.data(),
                              .counts = clusters.counts.data(),
                              .left = left.data()};
    params.scores = out.data();
    ScoreSummaries(params);
    params.scores = expected.data();
    RefScoreSummaries(params);
    // What the rows that are taken out add up to is divided by the number of those that are left.
    double of_rows = 0;
    for (int64_t c = 0; c < count; ++c) {
      const double gone = clusters.counts[c] - left[c];
      if (left[c] > 0) of_rows += 10 * std::sqrt(static_cast<double>(group)) * gone / left[c];
    }
    ExpectNear(out.span(), expected.span(),
               0.1 * Norm(q) * 2 * std::sqrt(double(count * dim)) + of_rows);
  }
}

TEST_P(SummaryAttentionTest, Attend_RandomShapes_MatchReference) {
  for (int trial = 0; trial < 80; ++trial) {
    const int64_t group = 1 + Below(trial % 10 == 0 ? 40 : 8);
    const int64_t dim = trial % 3 == 0 ? 128 : 1 + Below(200);
    const int64_t count = 1 + Below(trial % 7 == 0 ? 256 : 20),
                  rows = Below(trial % 4 == 0 ? 1000 : 100);
    SCOPED_TRACE(
        absl::StrCat("group ", group, " head_dim ", dim, " clusters ", count, " rows ", rows));
    const Clusters clusters(rng_, count, dim);
    const Bf16Rows v(rng_, rows, dim, true);
    const std::vector<float> scores = RandomNormal(rng_, group * count, trial % 5 == 0 ? 100 : 1);
    std::vector<uint8_t> row_cluster;
    for (int64_t j = 0; j < rows; ++j) row_cluster.push_back(static_cast<uint8_t>(Below(count)));
    SummaryAttentionParams params{.scores = scores.data(),
                                  .group = group,
                                  .head_dim = dim,
                                  .values = clusters.values.data() + 1,
                                  .value_scale = clusters.value_scale.data(),
                                  .counts = clusters.counts.data(),
                                  .rests = clusters.rests.data(),
                                  .clusters = count,
                                  .v = v.rows(),
                                  .row_cluster = row_cluster.data(),
                                  .row_weight = Below(2) == 0 ? -1.0f : 1.0f,
                                  .rows = rows};
    const std::vector<float> bound = RandomNormal(rng_, group);
    if (trial % 2 == 0) params.bound = bound.data();
    GuardedFloats out(group * dim), lse(group), expected(group * dim), expected_lse(group);
    params.out = out.data();
    params.lse = lse.data();
    GuardedFloats scratch(SummaryAttentionScratchFloats(params));
    AttendSummaries(params, scratch.data());
    params.out = expected.data();
    params.lse = expected_lse.data();
    RefAttendSummaries(params);
    ExpectAverageNear(out.span(), expected.span());
    ExpectLseNear(lse.span(), expected_lse.span());
  }
}

TEST_P(SummaryAttentionTest, HeadsTogether_EachHasTheBitsItHasAlone) {
  const int64_t rows = 90;
  for (int64_t group = 1; group <= 9; ++group) {
    const int64_t dim = 1 + Below(200), count = 1 + Below(256);
    SCOPED_TRACE(absl::StrCat("group ", group, " head_dim ", dim, " clusters ", count));
    const Clusters clusters(rng_, count, dim);
    const Bf16Rows v(rng_, rows, dim, true);
    const std::vector<float> q = RandomNormal(rng_, group * dim);
    const std::vector<float> row_scores = RandomNormal(rng_, group * rows);
    const std::vector<float> base = RandomNormal(rng_, group);
    std::vector<uint8_t> row_cluster;
    for (int64_t j = 0; j < rows; ++j) row_cluster.push_back(static_cast<uint8_t>(Below(count)));
    const auto attend = [&](int64_t h, int64_t heads, float* scores, float* out, float* lse) {
      ScoreSummaries({.q = q.data() + h * dim,
                      .group = heads,
                      .head_dim = dim,
                      .scale = 0.1f,
                      .keys = clusters.keys.data() + 1,
                      .key_scale = clusters.key_scale.data(),
                      .spread = clusters.spread.data(),
                      .clusters = count,
                      .row_cluster = row_cluster.data(),
                      .row_scores = row_scores.data() + h * rows,
                      .row_score_stride = rows,
                      .rows = rows,
                      .base = base.data() + h,
                      .counts = clusters.counts.data(),
                      .left = clusters.rests.data(),
                      .scores = scores});
      SummaryAttentionParams params{.scores = scores,
                                    .group = heads,
                                    .head_dim = dim,
                                    .values = clusters.values.data() + 1,
                                    .value_scale = clusters.value_scale.data(),
                                    .counts = clusters.counts.data(),
                                    .rests = clusters.rests.data(),
                                    .clusters = count,
                                    .v = v.rows(),
                                    .row_cluster = row_cluster.data(),
                                    .row_weight = -1,
                                    .rows = rows,
                                    .out = out,
                                    .lse = lse};
      GuardedFloats scratch(SummaryAttentionScratchFloats(params));
      AttendSummaries(params, scratch.data());
    };
    GuardedFloats scores(group * count), out(group * dim), lse(group);
    attend(0, group, scores.data(), out.data(), lse.data());
    for (int64_t h = 0; h < group; ++h) {
      GuardedFloats alone_scores(count), alone(dim), alone_lse(1);
      attend(h, 1, alone_scores.data(), alone.data(), alone_lse.data());
      EXPECT_TRUE(SameBits(alone_scores.span(), scores.span().subspan(h * count, count)));
      EXPECT_TRUE(SameBits(alone.span(), out.span().subspan(h * dim, dim)));
      EXPECT_EQ(alone_lse.span()[0], lse.span()[h]);
    }
  }
}

TEST_P(SummaryAttentionTest, SomeColumns_HaveTheBitsTheyHaveBesideTheOthers) {
  for (int trial = 0; trial < 40; ++trial) {
    const int64_t group = 1 + Below(9), dim = 1 + Below(200), count = 1 + Below(80), rows = 90;
    SCOPED_TRACE(absl::StrCat("group ", group, " head_dim ", dim, " clusters ", count));
    const Clusters clusters(rng_, count, dim);
    const Bf16Rows v(rng_, rows, dim, true);
    const std::vector<float> scores = RandomNormal(rng_, group * count);
    std::vector<uint8_t> row_cluster;
    for (int64_t j = 0; j < rows; ++j) row_cluster.push_back(static_cast<uint8_t>(Below(count)));
    GuardedFloats out(group * dim), lse(group);
    SummaryAttentionParams params{.scores = scores.data(),
                                  .group = group,
                                  .head_dim = dim,
                                  .values = clusters.values.data() + 1,
                                  .value_scale = clusters.value_scale.data(),
                                  .counts = clusters.counts.data(),
                                  .rests = clusters.rests.data(),
                                  .clusters = count,
                                  .v = v.rows(),
                                  .row_cluster = row_cluster.data(),
                                  .row_weight = -1,
                                  .rows = rows,
                                  .out = out.data(),
                                  .lse = lse.data()};
    GuardedFloats scratch(SummaryAttentionScratchFloats(params));
    AttendSummaries(params, scratch.data());
    params.first_column = 16 * Below((dim + 15) / 16);
    const int64_t end = params.first_column + 16 * (1 + Below(4));
    params.columns = std::min(end, dim) - params.first_column;
    GuardedFloats some(group * dim), some_lse(group);
    std::fill_n(some.data(), group * dim, 7.0f);
    params.out = some.data();
    params.lse = some_lse.data();
    GuardedFloats some_scratch(SummaryAttentionScratchFloats(params));
    AttendSummaries(params, some_scratch.data());
    EXPECT_TRUE(SameBits(some_lse.span(), lse.span()));
    for (int64_t i = 0; i < group * dim; ++i) {
      const bool wanted = i % dim >= params.first_column && i % dim < end;
      ASSERT_EQ(some.data()[i], wanted ? out.data()[i] : 7.0f) << "column " << i % dim;
    }
  }
}

// Clusters of one row each, whose means are the rows: attention over these rows.
TEST_P(SummaryAttentionTest, Attend_RowsAddedToEmptyCounts_IsSparseAttention) {
  const int64_t group = 4, dim = 64, rows = 100;
  const Bf16Rows v(rng_, rows, dim, true);
  std::vector<float> scores = RandomNormal(rng_, group * rows);
  const std::vector<int8_t> values(rows * dim, 3);
  const std::vector<float> zeros(rows, 0.0f), ones(rows, 1.0f);
  std::vector<uint8_t> row_cluster;
  for (int64_t j = 0; j < rows; ++j) row_cluster.push_back(static_cast<uint8_t>(j));
  GuardedFloats out(group * dim), lse(group), expected(group * dim), expected_lse(group);
  const SummaryAttentionParams params{.scores = scores.data(),
                                      .group = group,
                                      .head_dim = dim,
                                      .values = values.data(),
                                      .value_scale = ones.data(),
                                      .counts = zeros.data(),
                                      .rests = ones.data(),
                                      .clusters = rows,
                                      .v = v.rows(),
                                      .row_cluster = row_cluster.data(),
                                      .row_weight = 1,
                                      .rows = rows,
                                      .out = out.data(),
                                      .lse = lse.data()};
  GuardedFloats scratch(SummaryAttentionScratchFloats(params));
  AttendSummaries(params, scratch.data());
  RefSparseAttention({.group = group,
                      .v = v.rows(),
                      .rows = rows,
                      .head_dim = dim,
                      .scale = 1,
                      .scores = scores.data(),
                      .out = expected.data(),
                      .lse = expected_lse.data()});
  ExpectAverageNear(out.span(), expected.span());
  ExpectLseNear(lse.span(), expected_lse.span());
}

TEST_P(SummaryAttentionTest, Attend_NothingLeft_IsTheEmptyState) {
  const int64_t group = 3, dim = 20, count = 5;
  const Clusters clusters(rng_, count, dim);
  const Bf16Rows v(rng_, 1, dim, false);
  const std::vector<float> zeros(count, 0.0f);
  std::vector<float> scores = RandomNormal(rng_, group * count);
  scores[2] = std::numeric_limits<float>::infinity();  // of a cluster that does not count
  const uint8_t row_cluster = 1;
  for (const int64_t here : {int64_t{0}, count}) {
    GuardedFloats out(group * dim), lse(group);
    const SummaryAttentionParams params{.scores = scores.data(),
                                        .group = group,
                                        .head_dim = dim,
                                        .values = clusters.values.data(),
                                        .value_scale = clusters.value_scale.data(),
                                        .counts = clusters.counts.data(),
                                        .rests = zeros.data(),
                                        .clusters = here,
                                        .v = v.rows(),
                                        .row_cluster = &row_cluster,
                                        .row_weight = -1,
                                        .rows = here == 0 ? 0 : 1,
                                        .out = out.data(),
                                        .lse = lse.data()};
    GuardedFloats scratch(SummaryAttentionScratchFloats(params));
    AttendSummaries(params, scratch.data());
    for (float x : out.span()) EXPECT_EQ(x, 0.0f);
    for (float x : lse.span()) EXPECT_EQ(x, -INFINITY);
  }
}

}  // namespace
}  // namespace carrel::kernels
