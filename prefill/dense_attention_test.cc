#include "prefill/dense_attention.h"

#include "common/dtype.h"
#include "common/test_util.h"
#include "kernels/amx.h"
#include "kernels/attention/prefill_attention/prefill_attention.h"

namespace carrel::prefill {
namespace {

TEST(SamplePositionsTest, AreDistinctAscendingAndInside) {
  EXPECT_THAT(SamplePositions(5, 5), testing::ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(SamplePositions(3, 100), testing::ElementsAre(0, 1, 2));
  EXPECT_THAT(SamplePositions(1000, 4), testing::ElementsAre(125, 375, 625, 875));
}

// Every block size and pool gives the attention of plain double loops, and the rows come out
// rounded and in place. Nine q heads of a KV head go in parts of five and four where there is work for all threads.
void ExpectAnyBlocksEqualPlainLoops() {
  const uint64_t seed = TestSeed();
  constexpr int64_t kGroup = 9, kHeads = 2 * kGroup;
  const AttentionShape shape{1, kHeads, 2, 8};
  constexpr int64_t kTokens = 157;
  std::mt19937_64 rng(seed);
  const std::vector<float> q = RandomNormal(rng, kTokens * kHeads * 8, 3),
                           k = RandomNormal(rng, kTokens * 2 * 8, 3),
                           v = RandomNormal(rng, kTokens * 2 * 8);
  std::vector<float> expected(q.size());
  for (int64_t i = 0; i < kTokens; ++i) {
    for (int64_t h = 0; h < kHeads; ++h) {
      std::vector<double> weights(i + 1);
      double sum = 0;
      for (int64_t j = 0; j <= i; ++j) {
        double dot = 0;
        for (int64_t c = 0; c < 8; ++c)
          dot += double{q[(i * kHeads + h) * 8 + c]} * k[(j * 2 + h / kGroup) * 8 + c];
        sum += weights[j] = std::exp(dot / std::sqrt(8.0));
      }
      for (int64_t c = 0; c < 8; ++c) {
        double out = 0;
        for (int64_t j = 0; j <= i; ++j) out += weights[j] / sum * v[(j * 2 + h / kGroup) * 8 + c];
        expected[(i * kHeads + h) * 8 + c] = static_cast<float>(out);
      }
    }
  }
  for (int64_t block : {1, 64, 100, 157}) {
    ThreadPool pool(block == kTokens ? 0 : block % 3);
    DenseAttention attention(shape, kTokens, SamplePositions(kTokens, 10), {}, &pool);
    std::vector<float> attended(q.size());
    for (int64_t at = 0; at < kTokens; at += block) {
      model::AttentionInput input;
      input.first_position = at;
      input.n = std::min(block, kTokens - at);
      input.q = &q[at * kHeads * 8];
      input.k = &k[at * 16];
      input.v = &v[at * 16];
      CARREL_ASSERT_OK(attention.Attend(input, &attended[at * kHeads * 8]));
    }
    const double tolerance = kernels::PrefillAttentionPacksRows() ? 1e-4 : 1e-5;
    EXPECT_LE(RelativeError(attended, expected), tolerance) << "block " << block;
    const LayerRows rows = attention.TakeLayer(Layer(0));
    for (int64_t j = 0; j < kTokens; ++j) {
      for (int64_t c = 0; c < 8; ++c)
        ASSERT_EQ(rows.k[1][j * 8 + c], FloatToBf16(k[(j * 2 + 1) * 8 + c]));
    }
    ASSERT_EQ(rows.sample_positions.size(), 10u);
    for (int64_t s = 0; s < 10; ++s) {
      for (int64_t c = 0; c < kGroup * 8; ++c)
        ASSERT_EQ(rows.queries[1][s * kGroup * 8 + c],
                  q[(rows.sample_positions[s] * kHeads + kGroup) * 8 + c]);
    }
  }
}

TEST(DenseAttentionTest, AnyBlocks_EqualPlainLoops) {
  kernels::SetAmxUsedForTest(false);
  ExpectAnyBlocksEqualPlainLoops();
  kernels::SetAmxUsedForTest(true);
  ExpectAnyBlocksEqualPlainLoops();
}

}  // namespace
}  // namespace carrel::prefill
