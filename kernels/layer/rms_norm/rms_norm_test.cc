#include "kernels/layer/rms_norm/rms_norm.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(RmsNormTest);

TEST_P(RmsNormTest, RandomShapes_InAndOutOfPlace_MatchReference) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t n = Below(6), dim = 1 + Below(trial % 10 == 0 ? 5000 : 100);
    const int64_t x_stride = dim + Below(3), y_stride = dim + Below(3);
    SCOPED_TRACE(absl::StrCat("n ", n, " dim ", dim));
    const std::vector<float> x = RandomNormal(rng_, n * x_stride, trial % 2 == 0 ? 1.0f : 1e-3f);
    const std::vector<float> w = RandomNormal(rng_, dim);
    GuardedFloats y(n * y_stride);
    std::vector<float> expected = y.vector();
    RmsNorm(x.data(), n, dim, x_stride, w.data(), 1e-5f, y.data(), y_stride);
    RefRmsNorm(x.data(), n, dim, x_stride, w.data(), 1e-5f, expected.data(), y_stride);
    EXPECT_LE(RelativeError(y.span(), expected), 1e-6);

    std::vector<float> in_place = x;
    RmsNorm(in_place.data(), n, dim, x_stride, w.data(), 1e-5f, in_place.data(), x_stride);
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_TRUE(SameBits({in_place.data() + i * x_stride, static_cast<size_t>(dim)},
                           {y.data() + i * y_stride, static_cast<size_t>(dim)}));
    }
  }
}

TEST_P(RmsNormTest, ZeroRow_PositiveEps_StaysZero) {
  const std::vector<float> x(40, 0.0f), w = RandomNormal(rng_, 40);
  GuardedFloats y(40);
  RmsNorm(x.data(), 1, 40, 40, w.data(), 1e-6f, y.data(), 40);
  for (int64_t c = 0; c < 40; ++c) EXPECT_EQ(y.data()[c], 0.0f);
}

}  // namespace
}  // namespace carrel::kernels
