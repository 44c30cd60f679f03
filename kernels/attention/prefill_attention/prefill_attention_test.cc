#include "kernels/attention/prefill_attention/prefill_attention.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST_WITH_AMX(PrefillAttentionTest);

// Queries and keys of one head; out has the strides of one head among `heads`.
struct Case {
  Case(std::mt19937_64& rng, int64_t first, int64_t n, int64_t dim, float sigma, int64_t heads = 1)
      : stride(dim * heads),
        q(RandomNormal(rng, n * stride, sigma)),
        k(RandomNormal(rng, (first + n) * dim)),
        v(RandomNormal(rng, (first + n) * dim)),
        scratch(PrefillAttentionScratchFloats(dim, heads)) {
    params = {.q = q.data(),
              .q_stride = stride,
              .n = n,
              .first_position = first,
              .k = k.data(),
              .v = v.data(),
              .head_dim = dim,
              .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
              .out_stride = stride};
  }

  // Tokens [begin, end) into out [n, stride].
  void Run(int64_t begin, int64_t end, float* out) {
    PrefillAttentionParams part = params;
    part.q += begin * stride;
    part.n = end - begin;
    part.first_position += begin;
    part.out = out + begin * stride;
    GuardedFloats packed(PackedPrefillRowsFloats(part.first_position + part.n, part.head_dim));
    if (PrefillAttentionPacksRows()) {
      const int64_t rows = part.first_position + part.n, cut = rows / 3;
      PackPrefillRows(part.k, part.v, 0, cut, part.head_dim, packed.data());
      PackPrefillRows(part.k, part.v, cut, rows, part.head_dim, packed.data());
      part.packed = packed.data();
    }
    PrefillAttention(part, scratch.data());
  }

  int64_t stride;
  std::vector<float> q, k, v;
  GuardedFloats scratch;
  PrefillAttentionParams params;
};

// With AMX products are taken in parts of bf16: 6e-6 was measured where f32 has 4e-7.
double Tolerance() { return PrefillAttentionPacksRows() ? 2e-5 : 3e-6; }

void ExpectMatchesReference(Case& c, double tolerance) {
  SCOPED_TRACE(absl::StrCat("first ", c.params.first_position, " n ", c.params.n, " head_dim ",
                            c.params.head_dim));
  GuardedFloats out(c.params.n * c.stride);
  std::vector<float> expected = out.vector();
  c.Run(0, c.params.n, out.data());
  c.params.out = expected.data();
  RefPrefillAttention(c.params);
  ExpectAverageNear(out.span(), expected, tolerance);
}

TEST_P(PrefillAttentionTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t first = Below(trial % 4 == 0 ? 700 : 40);
    const int64_t n = trial % 5 == 0 ? kPrefillQueryTile : Below(kPrefillQueryTile + 1);
    const int64_t dim = trial % 3 == 0 ? 64 : 2 * (1 + Below(40));
    Case c(rng_, first, n, dim, 1.0f, 1 + Below(3));
    ExpectMatchesReference(c, Tolerance());
  }
}

TEST_P(PrefillAttentionTest, HeadDim128_ManyKeys_MatchesReference) {
  Case c(rng_, 2500, 33, 128, 1.0f);
  ExpectMatchesReference(c, Tolerance());
}

TEST_P(PrefillAttentionTest, PeakedLogits_MatchReference) {
  // Scores of magnitude m carry an error of m * 2^-24 and more into the weights; in parts, m * 2^-18.
  for (int64_t trial = 0; trial < 10; ++trial) {
    Case c(rng_, Below(500), 1 + Below(40), 64, 100.0f);
    ExpectMatchesReference(c, PrefillAttentionPacksRows() ? 3e-3 : 1e-4);
  }
}

TEST_P(PrefillAttentionTest, LaterKeysMuchLarger_OldSumsVanish) {
  // Each key block raises the maximum by far more than exp can hold.
  Case c(rng_, 600, 5, 8, 0.0f);
  std::fill(c.q.begin(), c.q.end(), 1.0f);
  for (int64_t j = 0; j < 605; ++j) {
    std::fill_n(c.k.begin() + j * 8, 8, static_cast<float>(100 * (j / 128)) - 1e4f);
  }
  ExpectMatchesReference(c, Tolerance());
}

TEST_P(PrefillAttentionTest, FirstToken_OnlyOwnKey_EqualsValue) {
  Case c(rng_, 0, 1, 64, 50.0f);
  GuardedFloats out(64);
  c.Run(0, 1, out.data());
  if (PrefillAttentionPacksRows()) return ExpectAverageNear(out.span(), c.v, 1e-5);
  EXPECT_TRUE(SameBits(out.span(), c.v));
}

TEST_P(PrefillAttentionTest, FutureKeys_NaN_AreNeverRead) {
  // One tile alone: keys after its last token are poisoned.
  Case c(rng_, 0, 100, 64, 1.0f);
  GuardedFloats clean(100 * 64), poisoned(100 * 64);
  c.Run(0, 40, clean.data());
  std::fill(c.k.begin() + 40 * 64, c.k.end(), NAN);
  std::fill(c.v.begin() + 40 * 64, c.v.end(), NAN);
  c.Run(0, 40, poisoned.data());
  EXPECT_TRUE(SameBits({clean.data(), 40 * 64}, {poisoned.data(), 40 * 64}));
}

TEST_P(PrefillAttentionTest, TokensSplitAnywhere_SameBits) {
  for (int64_t trial = 0; trial < 8; ++trial) {
    const int64_t n = 1 + Below(kPrefillQueryTile), dim = trial % 2 == 0 ? 64 : 2 * (1 + Below(20));
    Case c(rng_, Below(400), n, dim, 3.0f);
    GuardedFloats whole(n * dim), split(n * dim);
    c.Run(0, n, whole.data());
    for (int64_t begin = 0; begin < n;) {
      const int64_t end = std::min(n, begin + 1 + Below(60));
      c.Run(begin, end, split.data());
      begin = end;
    }
    EXPECT_TRUE(SameBits(whole.span(), split.span())) << "n " << n << " head_dim " << dim;
  }
}

TEST_P(PrefillAttentionTest, HeadsTogether_MatchReference_AndEachAlone) {
  for (int64_t trial = 0; trial < 12; ++trial) {
    const int64_t heads = 1 + Below(kMostPrefillHeads), n = 1 + Below(kPrefillQueryTile);
    const int64_t dim = trial % 2 == 0 ? 64 : 2 * (1 + Below(40));
    Case c(rng_, Below(500), n, dim, 1.0f, heads);
    c.params.heads = heads;
    ExpectMatchesReference(c, Tolerance());
    GuardedFloats whole(n * c.stride), alone(n * c.stride);
    c.Run(0, n, whole.data());
    c.params.heads = 1;
    for (int64_t h = 0; h < heads; ++h, c.params.q += dim) c.Run(0, n, alone.data() + h * dim);
    EXPECT_TRUE(SameBits(whole.span(), alone.span())) << "heads " << heads << " n " << n;
  }
}

TEST_P(PrefillAttentionTest, HeadsOfAGroup_GoInAsFewPartsAsACoreKeeps) {
  const auto kept = [](int64_t heads, int64_t dim) {
    return heads <= kMostPrefillHeads && heads * kPrefillQueryTile * (2 * dim + 2) * 4 <= 512 << 10;
  };
  for (int64_t group = 1; group <= 64; ++group) {
    for (const int64_t dim : {32, 64, 80, 128, 256, 512}) {
      SCOPED_TRACE(absl::StrCat("group ", group, " head_dim ", dim));
      const int64_t together = PrefillHeadsTogether(group, dim);
      const int64_t parts = (group + together - 1) / together;
      EXPECT_TRUE(together == 1 || (together <= group && kept(together, dim)));
      EXPECT_TRUE(parts == 1 || !kept((group + parts - 2) / (parts - 1), dim));
    }
  }
  EXPECT_EQ(PrefillHeadsTogether(6, 128), 3);
  EXPECT_EQ(PrefillHeadsTogether(7, 64), 7);
}

TEST_P(PrefillAttentionTest, NoTokens_WritesNothing) {
  Case c(rng_, 3, 1, 8, 1.0f);
  GuardedFloats out(8);
  c.Run(0, 0, out.data());
  EXPECT_TRUE(out.Untouched(0));
}

}  // namespace
}  // namespace carrel::kernels
