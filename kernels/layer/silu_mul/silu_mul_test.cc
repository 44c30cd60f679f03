#include "kernels/layer/silu_mul/silu_mul.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(SiluMulTest);

TEST_P(SiluMulTest, RandomSizes_MatchReference) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t count = trial < 40 ? trial : Below(5000);
    const std::vector<float> gate = RandomNormal(rng_, count, trial % 2 == 0 ? 2.0f : 30.0f);
    const std::vector<float> up = RandomNormal(rng_, count);
    GuardedFloats out(count);
    std::copy(gate.begin(), gate.end(), out.data());
    std::vector<float> expected = gate;
    SiluMul(out.data(), up.data(), count);
    RefSiluMul(expected.data(), up.data(), count);
    SCOPED_TRACE(absl::StrCat("count ", count));
    // Results below 1e-30 may be flushed to zero.
    ExpectNear(out.span(), expected, Norm(expected) + 1e-3 * Norm(up), 5e-7);
  }
}

TEST_P(SiluMulTest, ExtremeGates_NeverNaN) {
  std::vector<float> gate = {-1e4f, -100.0f, -88.5f, -0.0f, 0.0f, 88.5f, 100.0f, 1e4f};
  const std::vector<float> up(gate.size(), 2.0f);
  const std::vector<float> expected = {0, 0, 0, 0, 0, 177.0f, 200.0f, 2e4f};
  SiluMul(gate.data(), up.data(), static_cast<int64_t>(gate.size()));
  for (size_t i = 0; i < gate.size(); ++i) EXPECT_NEAR(gate[i], expected[i], 1e-30) << "gate " << i;
}

}  // namespace
}  // namespace carrel::kernels
