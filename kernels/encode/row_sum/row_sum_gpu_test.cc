#include "kernels/encode/row_sum/row_sum.h"
#include "kernels/gpu_test_data.h"

namespace carrel::kernels {
namespace {

class RowSumGpuTest : public GpuKernelTest {};

TEST_F(RowSumGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 24; ++trial) {
    const int64_t kv_heads = 1 + Below(5), head_dim = trial % 2 == 0 ? 64 : 128;
    const int64_t rows = Below(trial % 4 == 0 ? 30000 : 300), row_stride = rows + Below(5);
    const int64_t parts = 1 + Below(trial % 3 == 0 ? 200 : 5);
    const std::vector<uint16_t> x = RandomBf16(rng_, kv_heads * row_stride * head_dim);
    const DeviceInput<uint16_t> device_x(x);
    DeviceOutput<float> sums(kv_heads * parts * head_dim);
    RowSumParams params{device_x.data(), kv_heads, rows, row_stride, head_dim, parts, sums.data()};
    ASSERT_EQ(cudaSuccess, RowSum(params, nullptr));
    const std::vector<float> out = sums.Get();
    std::vector<float> expected(out.size());
    params.x = x.data();
    params.sums = expected.data();
    RefRowSum(params);
    ASSERT_TRUE(rows == 0 || RelativeError(out, expected) < 1e-5);
    for (size_t i = 0; rows == 0 && i < out.size(); ++i) ASSERT_EQ(out[i], 0.0f);
  }
}

TEST_F(RowSumGpuTest, UnservedShapes_AreRefused) {
  EXPECT_EQ(RowSum({.kv_heads = 1, .head_dim = 96, .parts = 1}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(RowSum({.kv_heads = 1, .head_dim = 64, .parts = 0}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(
      RowSum({.kv_heads = 1, .rows = 2, .row_stride = 1, .head_dim = 64, .parts = 1}, nullptr),
      cudaErrorInvalidValue);
}

}  // namespace
}  // namespace carrel::kernels
