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
    GuardedFloats out(group * count), expected(group * count);
    SummaryScoreParams params{.q = q.data(),
                              .group = group,
                              .head_dim = dim,
                              .scale = 0.1f,
                              .keys = clusters.keys.data() + 1,
                              .key_scale = clusters.key_scale.data(),
                              .spread = clusters.spread.data(),
                              .clusters = count};
    params.scores = out.data();
    ScoreSummaries(params);
    params.scores = expected.data();
    RefScoreSummaries(params);
    ExpectNear(out.span(), expected.span(), 0.1 * Norm(q) * 2 * std::sqrt(double(count * dim)));
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
    std::vector<float> row_weight;
    for (int64_t j = 0; j < rows; ++j) {
      row_cluster.push_back(static_cast<uint8_t>(Below(count)));
      row_weight.push_back(Below(2) == 0 ? -1.0f : 1.0f);
    }
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
                                  .row_weight = row_weight.data(),
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
                                      .row_weight = ones.data(),
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
  const std::vector<float> zeros(count, 0.0f), minus(1, -1.0f);
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
                                        .row_weight = minus.data(),
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
