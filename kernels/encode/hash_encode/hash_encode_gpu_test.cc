#include "kernels/encode/hash_encode/hash_encode.h"
#include "kernels/gpu_test_data.h"

namespace carrel::kernels {
namespace {

class HashEncodeGpuTest : public GpuKernelTest {};

struct Shape {
  int64_t kv_heads, rows, row_stride, code_stride, head_dim, bits;
};

// Bits must agree except where the inner product nearly vanishes.
void ExpectMatchesReference(std::mt19937_64& rng, const Shape& s) {
  SCOPED_TRACE("kv_heads " + std::to_string(s.kv_heads) + " rows " + std::to_string(s.rows) +
               " head_dim " + std::to_string(s.head_dim) + " bits " + std::to_string(s.bits));
  const std::vector<uint16_t> x = RandomBf16(rng, s.kv_heads * s.row_stride * s.head_dim);
  const std::vector<uint16_t> matrix = RandomBf16(rng, s.kv_heads * s.bits * s.head_dim, 0.1f);
  const int64_t words = s.bits / 32;
  const bool thresholds = rng() % 2 == 0;
  const std::vector<float> threshold = RandomNormal(rng, s.kv_heads * s.bits, 0.5f);
  const DeviceInput<uint16_t> device_x(x), device_matrix(matrix);
  const DeviceInput<float> device_threshold(threshold);
  DeviceOutput<uint32_t> codes(s.kv_heads * s.code_stride * words);
  std::vector<uint32_t> expected(static_cast<size_t>(s.kv_heads * s.code_stride * words), ~0u);
  std::vector<float> margin(static_cast<size_t>(s.kv_heads * s.rows * s.bits));
  HashEncodeParams params{.x = device_x.data(),
                          .matrix = device_matrix.data(),
                          .codes = codes.data(),
                          .kv_heads = s.kv_heads,
                          .rows = s.rows,
                          .row_stride = s.row_stride,
                          .code_stride = s.code_stride,
                          .head_dim = s.head_dim,
                          .bits = s.bits,
                          .threshold = thresholds ? device_threshold.data() : nullptr};
  ASSERT_EQ(cudaSuccess, HashEncode(params, nullptr));
  const std::vector<uint32_t> out = codes.Get();
  params.x = x.data();
  params.matrix = matrix.data();
  params.codes = expected.data();
  params.threshold = thresholds ? threshold.data() : nullptr;
  RefHashEncode(params, margin.data());
  int64_t undecided = 0;
  for (int64_t g = 0; g < s.kv_heads; ++g) {
    for (int64_t j = 0; j < s.code_stride; ++j) {
      for (int64_t i = 0; i < s.bits; ++i) {
        const auto at = static_cast<size_t>((g * s.code_stride + j) * words + i / 32);
        if (((out[at] ^ expected[at]) >> (i % 32) & 1) == 0) continue;
        ASSERT_LT(j, s.rows) << "written beyond the rows";
        ASSERT_LT(std::abs(margin[static_cast<size_t>((g * s.rows + j) * s.bits + i)]), 1e-6)
            << "head " << g << " row " << j << " bit " << i;
        ++undecided;
      }
    }
  }
  EXPECT_LE(undecided, 2 + s.kv_heads * s.rows * s.bits / 10000);
}

TEST_F(HashEncodeGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 36; ++trial) {
    const int64_t rows = Below(trial % 6 == 0 ? 5000 : 70);
    ExpectMatchesReference(rng_, {.kv_heads = 1 + Below(4),
                                  .rows = rows,
                                  .row_stride = rows + 1 + Below(5),
                                  .code_stride = rows + 1 + Below(5),
                                  .head_dim = trial % 2 == 0 ? 64 : 128,
                                  .bits = int64_t{64} << trial % 3});
  }
}

TEST_F(HashEncodeGpuTest, OneGroupOfQueries_MatchesReference) {
  for (int64_t group : {1, 4, 16}) {
    ExpectMatchesReference(rng_, {8, group, group, group, 128, 128});
  }
}

TEST_F(HashEncodeGpuTest, ZerosAndNaN_GiveZeroBits) {
  std::vector<uint16_t> x(2 * 64, 0);
  std::fill_n(x.begin() + 64, 64, 0x7fc0);
  const DeviceInput<uint16_t> device_x(x), matrix(RandomBf16(rng_, 64 * 64));
  DeviceOutput<uint32_t> codes(4);
  CARREL_ASSERT_CUDA(HashEncode({.x = device_x.data(),
                                 .matrix = matrix.data(),
                                 .codes = codes.data(),
                                 .kv_heads = 1,
                                 .rows = 2,
                                 .row_stride = 2,
                                 .code_stride = 2,
                                 .head_dim = 64,
                                 .bits = 64},
                                nullptr));
  EXPECT_EQ(codes.Get(), std::vector<uint32_t>(4, 0));
}

TEST_F(HashEncodeGpuTest, Largest_100kRows_256Bits_MatchesReference) {
  ExpectMatchesReference(rng_, {1, 100'001, 100'001, 100'001, 128, 256});
}

TEST_F(HashEncodeGpuTest, UnservedShapes_AreRefused) {
  EXPECT_EQ(HashEncode({.kv_heads = 1, .head_dim = 64, .bits = 96}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(HashEncode({.kv_heads = 1, .head_dim = 80, .bits = 64}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(
      HashEncode(
          {.kv_heads = 1, .rows = 2, .row_stride = 1, .code_stride = 2, .head_dim = 64, .bits = 64},
          nullptr),
      cudaErrorInvalidValue);
}

}  // namespace
}  // namespace carrel::kernels
