#include "kernels/layer/gelu_mul/gelu_mul.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(GeluMulTest);

TEST_P(GeluMulTest, RandomSizes_MatchReference) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t count = trial < 40 ? trial : Below(5000);
    const std::vector<float> gate = RandomNormal(rng_, count, trial % 2 == 0 ? 1.0f : 5.0f);
    const std::vector<float> up = RandomNormal(rng_, count);
    GuardedFloats out(count);
    std::copy(gate.begin(), gate.end(), out.data());
    std::vector<float> expected = gate;
    GeluMul(out.data(), up.data(), count);
    RefGeluMul(expected.data(), up.data(), count);
    SCOPED_TRACE(absl::StrCat("count ", count));
    // Far out on the negative side a result is tiny, and the rounding of its exponent x is |x| times
    // a float's: from 1e-3 down (x = -7) errors are measured by what 1e-3 may have.
    ExpectNear(out.span(), expected, Norm(expected) + 1e-3 * Norm(up), 5e-7);
  }
}

TEST_P(GeluMulTest, ExtremeGates_NeverNaN) {
  std::vector<float> gate = {-1e15f, -1e4f, -100.0f, -11.0f, -0.0f,
                             0.0f,   11.0f, 100.0f,  1e4f,   1e15f};
  const std::vector<float> up(gate.size(), 2.0f);
  const std::vector<float> expected = {0, 0, 0, 0, 0, 0, 22.0f, 200.0f, 2e4f, 2e15f};
  GeluMul(gate.data(), up.data(), static_cast<int64_t>(gate.size()));
  for (size_t i = 0; i < gate.size(); ++i) EXPECT_NEAR(gate[i], expected[i], 1e-30) << "gate " << i;
}

}  // namespace
}  // namespace carrel::kernels
