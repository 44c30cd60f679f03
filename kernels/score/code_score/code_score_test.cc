#include "kernels/score/code_score/code_score.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(CodeScoreTest);

struct Codes {
  std::vector<float> y;        // [keys, bits]
  std::vector<uint8_t> bytes;  // at an odd address, with nothing behind
  const uint8_t* blocks() const { return bytes.data() + 1; }
};

Codes MakeCodes(std::mt19937_64& rng, int64_t count, int64_t bits) {
  Codes codes;
  codes.y = RandomNormal(rng, count * kCodeBlockKeys * bits);
  codes.bytes.resize(static_cast<size_t>(1 + count * CodeBlockBytes(bits)));
  for (int64_t i = 0; i < count; ++i) {
    PackCodes(&codes.y[static_cast<size_t>(i * kCodeBlockKeys * bits)], kCodeBlockKeys, bits,
              codes.bytes.data() + 1 + i * CodeBlockBytes(bits));
  }
  return codes;
}

TEST_P(CodeScoreTest, ScoresAndTotals_RandomShapes_EqualReference) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t group = 1 + Below(trial % 5 == 0 ? 17 : 8), count = Below(6);
    const int64_t bits = trial % 2 == 0 ? 128 : 8 * (1 + Below(32));
    SCOPED_TRACE(absl::StrCat("group ", group, " blocks ", count, " bits ", bits));
    const Codes codes = MakeCodes(rng_, count, bits);
    const std::vector<float> u = RandomNormal(rng_, group * bits, trial % 3 == 0 ? 1e-3f : 5.0f);
    const std::vector<float> offset = RandomNormal(rng_, group, trial % 4 == 0 ? 1e4f : 1.0f);
    CodeTables tables;
    MakeCodeTables(u.data(), group, bits, tables);
    SetCodeOffsets(offset.data(), tables);
    std::vector<int16_t> out(static_cast<size_t>(count * 64 + 1), 77), expected = out;
    CodeScore(tables, codes.blocks(), count, out.data());
    RefCodeScore(tables, codes.blocks(), count, expected.data());
    EXPECT_EQ(out, expected);
    const int64_t stride = count * 64 + Below(3);
    std::vector<int16_t> totals(static_cast<size_t>(group * stride + 1), 77), ref = totals;
    CodeTotals(tables, codes.blocks(), count, totals.data(), stride);
    RefCodeTotals(tables, codes.blocks(), count, ref.data(), stride);
    EXPECT_EQ(totals, ref);
  }
}

TEST_P(CodeScoreTest, Scores_RandomQueries_FollowTheProductsWithTheBits) {
  for (const int64_t bits : {64, 128, 256}) {
    const int64_t group = 4, count = 3;
    const Codes codes = MakeCodes(rng_, count, bits);
    std::vector<float> u = RandomNormal(rng_, group * bits);
    for (int64_t i = 0; i < bits; ++i) u[static_cast<size_t>(i)] *= 3;  // one head is sharper
    const std::vector<float> offset = RandomNormal(rng_, group);
    CodeTables tables;
    MakeCodeTables(u.data(), group, bits, tables);
    SetCodeOffsets(offset.data(), tables);
    std::vector<int16_t> out(static_cast<size_t>(count * 64));
    CodeScore(tables, codes.blocks(), count, out.data());
    double worst = 0;
    for (int64_t j = 0; j < count * 64; ++j) {
      double best = -INFINITY;
      for (int64_t h = 0; h < group; ++h) {
        double sum = offset[static_cast<size_t>(h)];
        for (int64_t i = 0; i < bits; ++i) {
          sum += (codes.y[static_cast<size_t>(j * bits + i)] > 0 ? 1 : -1) *
                 double{u[static_cast<size_t>(h * bits + i)]};
        }
        best = std::max(best, sum);
      }
      worst = std::max(worst, std::abs(best - (tables.zero + tables.unit * out[j])));
    }
    // Each of bits / 4 entries is off by at most half a step of its table.
    EXPECT_LT(worst, tables.unit * (8 * 0.5 * bits / 4 + 2));
  }
}

TEST_P(CodeScoreTest, Scores_ZeroQuery_AreEqual) {
  const Codes codes = MakeCodes(rng_, 1, 128);
  const std::vector<float> u(128, 0.0f);
  const float offset = 3;
  CodeTables tables;
  MakeCodeTables(u.data(), 1, 128, tables);
  SetCodeOffsets(&offset, tables);
  std::vector<int16_t> out(64);
  CodeScore(tables, codes.blocks(), 1, out.data());
  for (int16_t score : out) EXPECT_EQ(score, out[0]);
}

TEST_P(CodeScoreTest, Pack_FewerKeysThanABlock_BitsAreSignsAndTheRestZero) {
  const int64_t bits = 128, keys = 1 + Below(64);
  const std::vector<float> y = RandomNormal(rng_, keys * bits);
  std::vector<uint8_t> block(static_cast<size_t>(CodeBlockBytes(bits)), 0xff);
  PackCodes(y.data(), keys, bits, block.data());
  for (int64_t r = 0; r < 64; ++r) {
    for (int64_t i = 0; i < bits; ++i) {
      const bool set = r < keys && y[static_cast<size_t>(r * bits + i)] > 0;
      ASSERT_EQ(CodeBit(block.data(), r, i), set) << "key " << r << " bit " << i;
    }
  }
}

TEST_P(CodeScoreTest, Append_AnyBarAndRoom_EqualsReferenceInParts) {
  for (int64_t trial = 0; trial < 100; ++trial) {
    const int64_t n = Below(400);
    std::vector<int16_t> scores(static_cast<size_t>(n));
    for (int16_t& score : scores)
      score = static_cast<int16_t>(Below(trial % 2 == 0 ? 7 : 60000) - 5);
    const auto bar = static_cast<int16_t>(Below(9) - 3);
    std::vector<uint32_t> all(static_cast<size_t>(n));
    int64_t expected = 0;
    ASSERT_EQ(RefAppendAbove(scores.data(), 0, n, bar, all.data(), n, &expected), n);
    all.resize(static_cast<size_t>(expected));
    std::vector<uint32_t> got;
    const int64_t room = 64 + Below(100);
    for (int64_t at = 0; at < n;) {
      std::vector<uint32_t> part(static_cast<size_t>(room));
      int64_t written = 0;
      const int64_t next = AppendAbove(scores.data(), at, n, bar, part.data(), room, &written);
      ASSERT_TRUE(next > at && next <= n && written <= room);
      got.insert(got.end(), part.begin(), part.begin() + written);
      at = next;
    }
    EXPECT_EQ(got, all);
  }
}

}  // namespace
}  // namespace carrel::kernels
