#include "kernels/gpu_test_data.h"
#include "kernels/half_test_data.h"
#include "kernels/layer/rms_norm/rms_norm.h"
#include "kernels/layer/rms_norm/rms_norm_cuda.h"

namespace carrel::kernels {
namespace {

class RmsNormGpuTest : public GpuKernelTest {};

TEST_F(RmsNormGpuTest, RandomShapes_MatchReference) {
  for (int trial = 0; trial < 30; ++trial) {
    const int64_t n = Below(9), dim = 4 * (1 + Below(trial % 5 == 0 ? 2000 : 100));
    SCOPED_TRACE(testing::Message() << "n " << n << " dim " << dim);
    const std::vector<float> x = RandomNormal(rng_, n * dim, trial % 2 == 0 ? 1.0f : 1e-3f);
    const std::vector<float> w = RandomNormal(rng_, dim);
    std::vector<float> want(x.size());
    RefRmsNorm(x.data(), n, dim, dim, w.data(), 1e-5f, want.data(), dim);
    const DeviceInput<float> dx(x), dw(w);
    const DeviceOutput<uint16_t> y(n * dim);
    ASSERT_EQ(cudaSuccess, RmsNormCuda(dx.data(), n, dim, dw.data(), 1e-5f, y.data(), nullptr));
    EXPECT_LE(RelativeError(Widen(y.Get()), want), kBf16Tolerance);
    const DeviceOutput<uint16_t> half(n * dim);
    ASSERT_EQ(cudaSuccess, RmsNormCuda(dx.data(), n, dim, dw.data(), 1e-5f, half.data(), nullptr,
                                       HalfType::kF16));
    EXPECT_LE(RelativeError(WidenF16(half.Get()), want), kF16Tolerance);
  }
}

TEST_F(RmsNormGpuTest, DimNotMultipleOfFour_IsRefused) {
  EXPECT_EQ(cudaErrorInvalidValue, RmsNormCuda(nullptr, 1, 6, nullptr, 1e-5f, nullptr, nullptr));
}

}  // namespace
}  // namespace carrel::kernels
