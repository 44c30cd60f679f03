#include <cmath>

#include "kernels/test_data.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd_math_test.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

template <class Function>
HWY_INLINE void Map(const float* x, int64_t count, const Function& function, float* out) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += lanes) {
    const int64_t width = std::min(lanes, count - i);
    StorePartial(d, function(LoadPartial(d, x + i, width)), out + i, width);
  }
}

void ExpOf(const float* x, int64_t count, float* out) {
  Map(
      x, count, [](FloatVec v) HWY_ATTR { return Exp(FloatTag(), v); }, out);
}

void ExpBelowOf(const float* x, int64_t count, float* out) {
  Map(
      x, count, [](FloatVec v) HWY_ATTR { return ExpBelow(FloatTag(), v); }, out);
}

void SumsOf(const float* rows, float* out, int64_t* lanes_out) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  SumOfLanes4(hn::LoadU(d, rows), hn::LoadU(d, rows + lanes), hn::LoadU(d, rows + 2 * lanes),
              hn::LoadU(d, rows + 3 * lanes), out);
  *lanes_out = lanes;
}

// v: as many vectors as AddBlocks takes, four rows to each; `of_four`: what SumOfLanes4 makes of them.
#if HWY_TARGET == HWY_SCALAR
int64_t BlockSumsOf(const float*, float*, float*) { return 0; }
#else
int64_t BlockSumsOf(const float* rows, float* sums, float* of_four) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr size_t kBlocks = hn::MaxLanes(FloatTag()) / 4;
  FloatVec v[kBlocks];
  for (size_t i = 0; i < kBlocks; ++i) {
    FloatVec row[4];
    for (int64_t r = 0; r < 4; ++r) {
      row[r] = hn::LoadU(d, rows + (4 * static_cast<int64_t>(i) + r) * lanes);
    }
    v[i] = BlockSums4(row[0], row[1], row[2], row[3]);
    SumOfLanes4(row[0], row[1], row[2], row[3], of_four + 4 * i);
  }
  hn::StoreU(AddBlocks(v), d, sums);
  return lanes;
}
#endif

void F16Of(const uint16_t* in, int64_t count, float* out) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* bytes = reinterpret_cast<const uint8_t*>(in);
  for (int64_t i = 0; i < count; i += lanes) hn::StoreU(F16Element::Load(d, bytes, i), d, out + i);
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(ExpOf);
HWY_EXPORT(ExpBelowOf);
HWY_EXPORT(SumsOf);
HWY_EXPORT(BlockSumsOf);
HWY_EXPORT(F16Of);

CARREL_KERNEL_TEST(SimdMathTest);

TEST_P(SimdMathTest, ExpBelow_IsOffByNoMoreThanItSays) {
  std::vector<float> x = {0.0f, -0.0f, -1e-30f, -1e-8f, -87.0f};
  for (int64_t i = 0; i < 200001; ++i) {
    x.push_back(std::uniform_real_distribution<float>(i % 2 == 0 ? -87.0f : -1.0f, 0.0f)(rng_));
  }
  GuardedFloats out(static_cast<int64_t>(x.size()));
  HWY_DYNAMIC_DISPATCH(ExpBelowOf)(x.data(), out.size(), out.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(double{x[i]});
    ASSERT_NEAR(out.data()[i] / exact, 1.0, 2e-7 + 8e-8 * std::abs(x[i])) << "x " << x[i];
  }
  EXPECT_EQ(out.data()[0], 1.0f);
  const std::vector<float> edges = {-INFINITY, -1e30f, -88.0f, -200.0f, NAN};
  GuardedFloats of_edges(static_cast<int64_t>(edges.size()));
  HWY_DYNAMIC_DISPATCH(ExpBelowOf)(edges.data(), of_edges.size(), of_edges.data());
  for (size_t i = 0; i + 1 < edges.size(); ++i) EXPECT_EQ(of_edges.data()[i], 0.0f) << edges[i];
  EXPECT_TRUE(std::isnan(of_edges.data()[4]));
}

TEST_P(SimdMathTest, Exp_Range_RelativeErrorAtMost2e7) {
  std::vector<float> x;
  for (int64_t i = 0; i < 200001; ++i) {
    x.push_back(std::uniform_real_distribution<float>(-87.0f, 88.0f)(rng_));
  }
  GuardedFloats out(static_cast<int64_t>(x.size()));
  HWY_DYNAMIC_DISPATCH(ExpOf)(x.data(), out.size(), out.data());
  double worst = 0;
  for (int64_t i = 0; i < out.size(); ++i) {
    const double exact = std::exp(double{x[i]});
    worst = std::max(worst, std::abs(out.data()[i] - exact) / exact);
  }
  EXPECT_LE(worst, 2e-7);
}

TEST_P(SimdMathTest, Exp_Edges_ExactValues) {
  const float inf = INFINITY;
  const std::vector<float> x = {0.0f, -0.0f, -88.0f, -1e4f, -3e38f, -inf, 89.0f, inf, NAN};
  GuardedFloats out(static_cast<int64_t>(x.size()));
  HWY_DYNAMIC_DISPATCH(ExpOf)(x.data(), out.size(), out.data());
  const std::vector<float> expected = {1, 1, 0, 0, 0, 0, inf, inf};
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(out.data()[i], expected[i]) << x[i];
  EXPECT_TRUE(std::isnan(out.data()[8]));
}

TEST_P(SimdMathTest, SumOfLanes4_AnyPlace_SameBits) {
  // The same values in each of the four places: each sum must be taken in the same order.
  const std::vector<float> row = RandomNormal(rng_, 16);
  float sums[4];
  int64_t lanes = 1;
  std::vector<float> rows(64);
  HWY_DYNAMIC_DISPATCH(SumsOf)(rows.data(), sums, &lanes);
  double exact = 0;
  for (int64_t i = 0; i < lanes; ++i) exact += row[i];
  for (int64_t i = 0; i < 4 * lanes; ++i) rows[i] = row[i % lanes];
  HWY_DYNAMIC_DISPATCH(SumsOf)(rows.data(), sums, &lanes);
  EXPECT_NEAR(sums[0], exact, 1e-5);
  EXPECT_TRUE(SameBits({sums, 4}, {{sums[0], sums[0], sums[0], sums[0]}}));
}

TEST_P(SimdMathTest, AddBlocks_RandomRows_BitsOfSumOfLanes4) {
  for (int round = 0; round < 100; ++round) {
    const std::vector<float> rows = RandomNormal(rng_, 256);
    float sums[16], of_four[16];
    const auto lanes =
        static_cast<size_t>(HWY_DYNAMIC_DISPATCH(BlockSumsOf)(rows.data(), sums, of_four));
    EXPECT_TRUE(SameBits({sums, lanes}, {of_four, lanes}));
  }
}

TEST_P(SimdMathTest, F16_EveryFiniteValue_WidensExactly) {
  std::vector<uint16_t> bits;
  for (uint32_t b = 0; b < 0x10000; ++b) {
    if ((b & 0x7c00) != 0x7c00) bits.push_back(static_cast<uint16_t>(b));
  }
  ASSERT_EQ(bits.size() % 16, 0u);
  std::vector<float> out(bits.size());
  HWY_DYNAMIC_DISPATCH(F16Of)(bits.data(), static_cast<int64_t>(bits.size()), out.data());
  for (size_t i = 0; i < bits.size(); ++i) ASSERT_EQ(out[i], F16ToFloat(bits[i])) << bits[i];
}

}  // namespace carrel::kernels
#endif
