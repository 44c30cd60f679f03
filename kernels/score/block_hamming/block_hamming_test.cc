#include "kernels/score/block_hamming/block_hamming.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(BlockHammingTest);

std::vector<float> Signs(std::mt19937_64& rng, int64_t count) {
  std::vector<float> signs(static_cast<size_t>(count));
  for (float& sign : signs) sign = rng() % 2 == 0 ? -1.0f : 1.0f;
  return signs;
}

// The definition, key by key and bit by bit.
int64_t Agreeing(const std::vector<float>& y, int64_t group, int64_t bits, const void* block,
                 int64_t key) {
  int64_t agree = 0;
  for (int64_t h = 0; h < group; ++h) {
    for (int64_t i = 0; i < bits; ++i) {
      agree += (y[static_cast<size_t>(h * bits + i)] > 0) == (CodeBit(block, key, i) != 0);
    }
  }
  return agree;
}

TEST_P(BlockHammingTest, EveryGroup_AnyBitsAndCount_EqualsReferenceAndDefinition) {
  for (int64_t group = 1; group <= kMaxHammingGroup; ++group) {
    const int64_t widths[] = {8, 24, 64, 128, 256, 8 + 8 * Below(32)};
    const int64_t bits = widths[Below(6)], count = Below(6);
    SCOPED_TRACE("group " + std::to_string(group) + " bits " + std::to_string(bits) + " count " +
                 std::to_string(count));
    const int64_t bytes = count * CodeBlockBytes(bits);
    std::vector<uint8_t> codes(static_cast<size_t>(bytes + 1));
    for (uint8_t& byte : codes) byte = static_cast<uint8_t>(rng_());
    uint8_t* blocks = codes.data() + 1;  // any address
    const std::vector<float> y = Signs(rng_, group * bits);
    // The extremes: a key equal to a query (with a group of one: every bit agrees), its opposite.
    for (int64_t i = 0; count > 0 && i < bits / 8; ++i) {
      unsigned byte = 0;
      for (int64_t b = 0; b < 8; ++b) byte |= (y[static_cast<size_t>(8 * i + b)] > 0) << b;
      blocks[i * kCodeBlockKeys] = static_cast<uint8_t>(byte);
      blocks[i * kCodeBlockKeys + 1] = static_cast<uint8_t>(~byte);
    }
    HammingTables tables;
    MakeHammingTables(y.data(), group, bits, tables);
    constexpr int16_t kPoison = -12345;
    const auto keys = static_cast<size_t>(count * kCodeBlockKeys);
    std::vector<int16_t> out(keys + 1, kPoison), expected(keys + 1, kPoison);
    BlockHammingScore(tables, blocks, count, out.data());
    RefBlockHammingScore(tables, blocks, count, expected.data());
    ASSERT_EQ(out, expected);
    for (size_t j = 0; j < keys; ++j) {
      const auto key = static_cast<int64_t>(j);
      ASSERT_EQ(out[j],
                Agreeing(y, group, bits, blocks + key / kCodeBlockKeys * CodeBlockBytes(bits),
                         key % kCodeBlockKeys));
    }
  }
}

TEST_P(BlockHammingTest, LargestGroup_EveryBitAgrees_DoesNotOverflow) {
  const int64_t bits = kMaxCodeBits, group = kMaxHammingGroup;
  const std::vector<float> y(static_cast<size_t>(group * bits), 1.0f);
  const std::vector<uint8_t> ones(static_cast<size_t>(CodeBlockBytes(bits)), 0xff);
  HammingTables tables;
  MakeHammingTables(y.data(), group, bits, tables);
  std::vector<int16_t> out(kCodeBlockKeys);
  BlockHammingScore(tables, ones.data(), 1, out.data());
  for (const int16_t score : out) EXPECT_EQ(score, group * bits);
}

}  // namespace
}  // namespace carrel::kernels
