// What:   the register tile under prefill_attention: C = A B for a few rows of A, taken one scalar
//         at a time from where they lie, and two vectors' width of columns of B, packed.
// Math:   sums[m, w] = sum_{c < inner} a(m, c) * b[c, w],  m < kRows, w < 2 Lanes, in fp32 in the
//         order of c: a value does not depend on the tile that it is computed in.
// Cost:   2 loads and kRows broadcasts for 2 kRows multiply-adds.
#if defined(CARREL_KERNELS_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_TILE_INL_H_
#undef CARREL_KERNELS_TILE_INL_H_
#else
#define CARREL_KERNELS_TILE_INL_H_
#endif

#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// 2 * rows accumulators, one broadcast and two columns must fit the registers: 32 or 16.
inline constexpr int kTileRows =
    (HWY_TARGET <= HWY_AVX3 || HWY_TARGET == HWY_NEON) && HWY_TARGET != HWY_AVX2 ? 8 : 4;

// How a(m, c) lies in memory: rows of A contiguous in c, or rows of A^T contiguous in m.
enum class TileLayout { kRowMajor, kTransposed };

template <TileLayout kLayout>
HWY_INLINE float TileElement(const float* a, int64_t stride, int64_t m, int64_t c) {
  return kLayout == TileLayout::kRowMajor ? a[m * stride + c] : a[c * stride + m];
}

HWY_INLINE void TileStep(FloatTag d, float a, FloatVec b0, FloatVec b1, FloatVec& sum0,
                         FloatVec& sum1) {
  const FloatVec x = hn::Set(d, a);
  sum0 = hn::MulAdd(x, b0, sum0);
  sum1 = hn::MulAdd(x, b1, sum1);
}

// done(m, sum0, sum1) receives row m's sums. b is aligned.
template <TileLayout kLayout, class Done, size_t... kM>
HWY_INLINE void Tile(const float* a, int64_t stride, int64_t inner, const float* b,
                     const Done& done, std::index_sequence<kM...>) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  FloatVec sum0[sizeof...(kM)] = {((void)kM, hn::Zero(d))...};
  FloatVec sum1[sizeof...(kM)] = {((void)kM, hn::Zero(d))...};
  for (int64_t c = 0; c < inner; ++c, b += 2 * lanes) {
    const FloatVec b0 = hn::Load(d, b), b1 = hn::Load(d, b + lanes);
    (TileStep(d, TileElement<kLayout>(a, stride, kM, c), b0, b1, sum0[kM], sum1[kM]), ...);
  }
  (done(kM, sum0[kM], sum1[kM]), ...);
}

// All `rows` rows of A; done(m, sum0, sum1) for m in [0, rows).
template <TileLayout kLayout, class Done>
HWY_INLINE void TileRows(const float* a, int64_t stride, int64_t rows, int64_t inner,
                         const float* b, const Done& done) {
  const int64_t step = kLayout == TileLayout::kRowMajor ? stride : 1;
  int64_t m = 0;
  const auto shifted = [&](int64_t i, FloatVec s0, FloatVec s1) { done(m + i, s0, s1); };
  for (; m + kTileRows <= rows; m += kTileRows) {
    Tile<kLayout>(a + m * step, stride, inner, b, shifted, std::make_index_sequence<kTileRows>());
  }
  for (; m + 2 <= rows; m += 2) {
    Tile<kLayout>(a + m * step, stride, inner, b, shifted, std::make_index_sequence<2>());
  }
  if (m < rows) {
    Tile<kLayout>(a + m * step, stride, inner, b, shifted, std::make_index_sequence<1>());
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
