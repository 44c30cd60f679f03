#include "kernels/attention/merge_states/merge_states.h"

#include <algorithm>
#include <numeric>

#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(MergeStatesTest);

struct State {
  std::vector<float> out, lse;
};

// Attention of the heads over the rows listed, from scores given for all rows.
State AttendTo(const std::vector<int64_t>& rows, const std::vector<float>& scores, int64_t total,
               int64_t heads, int64_t dim, const Bf16Rows& v) {
  std::vector<const void*> pointers;
  std::vector<float> chosen;
  for (int64_t j : rows) pointers.push_back(v.rows()[j]);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t j : rows) chosen.push_back(scores[h * total + j]);
  }
  State state{std::vector<float>(heads * dim, NAN), std::vector<float>(heads, NAN)};
  SparseAttention({.group = heads,
                   .v = pointers.data(),
                   .rows = static_cast<int64_t>(rows.size()),
                   .head_dim = dim,
                   .scores = chosen.data(),
                   .out = state.out.data(),
                   .lse = state.lse.data()});
  return state;
}

TEST_P(MergeStatesTest, DisjointSets_AnyOrder_EqualsAttentionOverUnion) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t total = 1 + Below(200), heads = 1 + Below(8), dim = 2 * (1 + Below(70));
    SCOPED_TRACE(absl::StrCat("rows ", total, " heads ", heads, " head_dim ", dim));
    const Bf16Rows v(rng_, total, dim, true);
    std::vector<float> scores = RandomNormal(rng_, heads * total, trial % 3 == 0 ? 100.0f : 1.0f);
    if (trial % 4 == 0) {
      for (float& x : scores) x -= 1e4f;
    }
    // Up to five sets, some empty, merged in random order.
    std::vector<std::vector<int64_t>> sets(5);
    std::vector<int64_t> all(static_cast<size_t>(total));
    std::iota(all.begin(), all.end(), int64_t{0});
    for (int64_t j : all) sets[Below(trial % 2 == 0 ? 5 : 2)].push_back(j);
    std::shuffle(sets.begin(), sets.end(), rng_);
    State merged = AttendTo({}, scores, total, heads, dim, v);
    for (const auto& set : sets) {
      const State part = AttendTo(set, scores, total, heads, dim, v);
      MergeStates(merged.out.data(), merged.lse.data(), part.out.data(), part.lse.data(), heads,
                  dim);
    }
    const State whole = AttendTo(all, scores, total, heads, dim, v);
    ExpectLseNear(merged.lse, whole.lse);
    // lse near 1e4 is rounded to 2^-11, and the weights with it.
    ExpectAverageNear(merged.out, whole.out, trial % 4 == 0 ? 2e-3 : 1e-4);
  }
}

TEST_P(MergeStatesTest, RandomStates_MatchReference) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t heads = Below(9), dim = 1 + Below(130);
    GuardedFloats out(heads * dim), lse(heads);
    const std::vector<float> a = RandomNormal(rng_, heads * dim), b = RandomNormal(rng_, a.size());
    std::vector<float> lse_a = RandomNormal(rng_, heads, 5.0f), lse_b = RandomNormal(rng_, heads);
    for (int64_t h = 0; h < heads; ++h) {
      if (Below(8) == 0) lse_a[h] = -INFINITY;
      if (Below(8) == 0) lse_b[h] = -INFINITY;
    }
    std::copy(a.begin(), a.end(), out.data());
    std::copy(lse_a.begin(), lse_a.end(), lse.data());
    std::vector<float> expected = a;
    MergeStates(out.data(), lse.data(), b.data(), lse_b.data(), heads, dim);
    RefMergeStates(expected.data(), lse_a.data(), b.data(), lse_b.data(), heads, dim);
    EXPECT_LE(RelativeError(out.span(), expected), 1e-6);
    ExpectLseNear(lse.span(), lse_a);
  }
}

TEST_P(MergeStatesTest, EmptySide_PoisonedOut_OtherSideKeepsItsBits) {
  const std::vector<float> value = RandomNormal(rng_, 64), poison(64, NAN);
  const float empty = -INFINITY, lse = 3.25f;
  std::vector<float> a = value;
  float lse_a = lse;
  MergeStates(a.data(), &lse_a, poison.data(), &empty, 1, 64);
  EXPECT_TRUE(SameBits(a, value));
  EXPECT_EQ(lse_a, lse);
  std::vector<float> b = poison;
  float lse_b = empty;
  MergeStates(b.data(), &lse_b, value.data(), &lse, 1, 64);
  EXPECT_TRUE(SameBits(b, value));
  EXPECT_EQ(lse_b, lse);
}

TEST_P(MergeStatesTest, BothEmpty_StaysEmpty) {
  std::vector<float> a(8, 0.0f), b(8, 0.0f);
  float lse_a = -INFINITY, lse_b = -INFINITY;
  MergeStates(a.data(), &lse_a, b.data(), &lse_b, 1, 8);
  EXPECT_EQ(lse_a, -INFINITY);
  EXPECT_EQ(a, b);
}

}  // namespace
}  // namespace carrel::kernels
