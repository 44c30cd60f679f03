#include "kernels/layer/rope/rope.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(RopeTest);

std::vector<float> InvFreq(int64_t head_dim, float theta) {
  std::vector<float> inv_freq;
  for (int64_t c = 0; c < head_dim / 2; ++c) {
    inv_freq.push_back(1.0f / std::pow(theta, static_cast<float>(2 * c) / head_dim));
  }
  return inv_freq;
}

TEST_P(RopeTest, RandomShapes_AnyPosition_MatchReference) {
  for (int64_t trial = 0; trial < 50; ++trial) {
    const int64_t n = Below(5), heads = 1 + Below(4), dim = 2 * (1 + Below(100));
    const int64_t first = Below(trial % 2 == 0 ? 100 : 1000000);
    SCOPED_TRACE(absl::StrCat("n ", n, " heads ", heads, " head_dim ", dim, " first ", first));
    const std::vector<float> inv_freq = InvFreq(dim, 500000.0f);
    const std::vector<float> x = RandomNormal(rng_, n * heads * dim);
    GuardedFloats out(n * heads * dim);
    std::copy(x.begin(), x.end(), out.data());
    std::vector<float> expected = x;
    Rope(out.data(), n, heads, dim, first, inv_freq.data());
    RefRope(expected.data(), n, heads, dim, first, inv_freq.data());
    EXPECT_LE(RelativeError(out.span(), expected), 1e-6);
  }
}

TEST_P(RopeTest, PositionZero_AnyHead_ChangesNothing) {
  const std::vector<float> inv_freq = InvFreq(64, 10000.0f), x = RandomNormal(rng_, 3 * 64);
  std::vector<float> out = x;
  Rope(out.data(), 1, 3, 64, 0, inv_freq.data());
  EXPECT_EQ(out, x);
}

TEST_P(RopeTest, TokensSplit_AnyCut_SameBits) {
  const int64_t n = 9, heads = 2, dim = 36, first = 12345;
  const std::vector<float> inv_freq = InvFreq(dim, 10000.0f);
  std::vector<float> whole = RandomNormal(rng_, n * heads * dim), split = whole;
  const int64_t cut = 1 + Below(n - 1);
  Rope(whole.data(), n, heads, dim, first, inv_freq.data());
  Rope(split.data(), cut, heads, dim, first, inv_freq.data());
  Rope(split.data() + cut * heads * dim, n - cut, heads, dim, first + cut, inv_freq.data());
  EXPECT_TRUE(SameBits(whole, split));
}

}  // namespace
}  // namespace carrel::kernels
