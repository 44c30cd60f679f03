#include "kernels/gpu_test_data.h"
#include "kernels/half_test_data.h"
#include "kernels/layer/silu_mul/silu_mul.h"
#include "kernels/layer/silu_mul/silu_mul_cuda.h"

namespace carrel::kernels {
namespace {

class SiluMulGpuTest : public GpuKernelTest {};

TEST_F(SiluMulGpuTest, RandomShapes_MatchReference) {
  for (int trial = 0; trial < 20; ++trial) {
    const int64_t n = Below(9), width = 4 * (1 + Below(600));
    const std::vector<float> x = RandomNormal(rng_, n * 2 * width, trial % 3 == 0 ? 60.0f : 1.0f);
    std::vector<float> gate, up;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < width; ++c) gate.push_back(x[i * 2 * width + c]);
      for (int64_t c = 0; c < width; ++c) up.push_back(x[(i * 2 + 1) * width + c]);
    }
    RefSiluMul(gate.data(), up.data(), n * width);
    const DeviceInput<float> dx(x);
    const DeviceOutput<uint16_t> y(n * width);
    ASSERT_EQ(cudaSuccess, SiluMulCuda(dx.data(), n, width, y.data(), nullptr));
    EXPECT_LE(RelativeError(Widen(y.Get()), gate), kBf16Tolerance);
    const DeviceOutput<uint16_t> half(n * width);
    ASSERT_EQ(cudaSuccess, SiluMulCuda(dx.data(), n, width, half.data(), nullptr, HalfType::kF16));
    EXPECT_LE(RelativeError(WidenF16(half.Get()), gate), kF16Tolerance);
  }
}

TEST_F(SiluMulGpuTest, BeyondF16_IsItsLargest) {
  const DeviceInput<float> x(std::vector<float>{1000, 1000, 1000, 1, 1000, -1000, 10, 1});
  const DeviceOutput<uint16_t> y(4);
  ASSERT_EQ(cudaSuccess, SiluMulCuda(x.data(), 1, 4, y.data(), nullptr, HalfType::kF16));
  const std::vector<float> wide = WidenF16(y.Get());
  EXPECT_EQ(wide[0], 65504);
  EXPECT_EQ(wide[1], -65504);
  EXPECT_NEAR(wide[2], 10000, 4);
}

TEST_F(SiluMulGpuTest, VeryNegativeGate_IsZero) {
  const DeviceInput<float> x(
      std::vector<float>{-1e4f, -1e4f, -1e4f, -1e4f, -200, -200, -90, -90, 1, 2, 3, 4, 5, 6, 7, 8});
  const DeviceOutput<uint16_t> y(8);
  ASSERT_EQ(cudaSuccess, SiluMulCuda(x.data(), 1, 8, y.data(), nullptr));
  for (float value : Widen(y.Get())) EXPECT_NEAR(value, 0.0f, 1e-30f);
}

}  // namespace
}  // namespace carrel::kernels
