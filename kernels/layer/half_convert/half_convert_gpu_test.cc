#include <bit>

#include "common/dtype.h"
#include "kernels/gpu_test_data.h"
#include "kernels/layer/half_convert/half_convert.h"

namespace carrel::kernels {
namespace {

// Every bf16 value there is.
TEST(HalfConvertGpuTest, AllValues_AreRoundedOrBounded) {
  std::vector<uint16_t> x(65536);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(i);
  const DeviceInput<uint16_t> in(x);
  DeviceOutput<uint16_t> out(65536);
  CARREL_ASSERT_CUDA(Bf16ToF16Cuda(in.data(), 65536, out.data(), nullptr));
  const std::vector<uint16_t> y = out.Get();
  for (size_t i = 0; i < x.size(); ++i) {
    const auto wide = std::bit_cast<float>(static_cast<uint32_t>(x[i]) << 16);
    const float got = F16ToFloat(y[i]);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(got)) << i;
    } else if (std::abs(wide) > 65504) {
      EXPECT_EQ(got, std::copysign(65504.0f, wide)) << i;
    } else if (std::abs(wide) >= 0x1p-14f) {
      EXPECT_EQ(got, wide) << i;
    } else {
      EXPECT_LE(std::abs(got - wide), 0x1p-25f) << i;  // half of the least f16
    }
  }
}

TEST(HalfConvertGpuTest, NothingAndOddCounts) {
  EXPECT_EQ(cudaSuccess, Bf16ToF16Cuda(nullptr, 0, nullptr, nullptr));
  EXPECT_EQ(cudaErrorInvalidValue, Bf16ToF16Cuda(nullptr, 3, nullptr, nullptr));
}

}  // namespace
}  // namespace carrel::kernels
