#include "kernels/gpu_test_data.h"
#include "kernels/score/hamming_score/hamming_score.h"

namespace carrel::kernels {
namespace {

class HammingScoreGpuTest : public GpuKernelTest {};

void ExpectEqualsReference(std::mt19937_64& rng, int64_t kv_heads, int64_t group, int64_t bits,
                           int64_t rows, int64_t extra) {
  SCOPED_TRACE("kv_heads " + std::to_string(kv_heads) + " group " + std::to_string(group) +
               " bits " + std::to_string(bits) + " rows " + std::to_string(rows));
  const int64_t words = bits / 32, code_stride = rows + extra, score_stride = rows + 2 * extra;
  std::vector<uint32_t> queries = RandomWords(rng, kv_heads * group * words);
  std::vector<uint32_t> codes = RandomWords(rng, kv_heads * code_stride * words);
  // The extremes: a key equal to a query, and its opposite.
  for (int64_t g = 0; g < kv_heads && rows >= 2; ++g) {
    for (int64_t w = 0; w < words; ++w) {
      codes[(g * code_stride + rows - 1) * words + w] = queries[g * group * words + w];
      codes[g * code_stride * words + w] = ~queries[g * group * words + w];
    }
  }
  const DeviceInput<uint32_t> device_queries(queries), device_codes(codes);
  DeviceOutput<uint16_t> scores(kv_heads * score_stride);
  std::vector<uint16_t> expected(static_cast<size_t>(kv_heads * score_stride), 0xffff);
  HammingScoreParams params{.queries = device_queries.data(),
                            .codes = device_codes.data(),
                            .scores = scores.data(),
                            .kv_heads = kv_heads,
                            .group = group,
                            .bits = bits,
                            .rows = rows,
                            .code_stride = code_stride,
                            .score_stride = score_stride};
  ASSERT_EQ(cudaSuccess, HammingScore(params, nullptr));
  const std::vector<uint16_t> out = scores.Get();
  params.queries = queries.data();
  params.codes = codes.data();
  params.scores = expected.data();
  RefHammingScore(params);
  ASSERT_EQ(out, expected);
}

TEST_F(HammingScoreGpuTest, EveryGroupAndWidth_EqualsReference) {
  for (int64_t bits : {64, 128, 256}) {
    for (int64_t group = 1; group <= 16; ++group) {
      ExpectEqualsReference(rng_, 1 + Below(3), group, bits, Below(3000), Below(3));
    }
  }
}

TEST_F(HammingScoreGpuTest, EverySmallCount_EqualsReference) {
  for (int64_t rows = 0; rows < 40; ++rows) ExpectEqualsReference(rng_, 2, 4, 128, rows, 1);
}

TEST_F(HammingScoreGpuTest, QueriesAllAlike_EqualsReference) {
  // One plane carries all the weight; the others are empty.
  std::vector<uint32_t> query = RandomWords(rng_, 4), queries;
  for (int h = 0; h < 16; ++h) queries.insert(queries.end(), query.begin(), query.end());
  const std::vector<uint32_t> codes = RandomWords(rng_, 4 * 1000);
  const DeviceInput<uint32_t> device_queries(queries), device_codes(codes);
  DeviceOutput<uint16_t> scores(1000);
  std::vector<uint16_t> expected(1000);
  HammingScoreParams params{
      device_queries.data(), device_codes.data(), scores.data(), 1, 16, 128, 1000, 1000, 1000};
  CARREL_ASSERT_CUDA(HammingScore(params, nullptr));
  params.queries = queries.data();
  params.codes = codes.data();
  params.scores = expected.data();
  RefHammingScore(params);
  EXPECT_EQ(scores.Get(), expected);
}

TEST_F(HammingScoreGpuTest, Largest_1MRows_EightHeads_EqualsReference) {
  ExpectEqualsReference(rng_, 8, 4, 128, 1 << 20, 3);
}

TEST_F(HammingScoreGpuTest, UnservedShapes_AreRefused) {
  EXPECT_EQ(HammingScore({.kv_heads = 1, .group = 17, .bits = 128}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(HammingScore({.kv_heads = 1, .group = 4, .bits = 96}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(HammingScore({.kv_heads = 1, .group = 4, .bits = 64, .rows = 1}, nullptr),
            cudaErrorInvalidValue);
}

}  // namespace
}  // namespace carrel::kernels
