// What:   what the SIMD kernels share, compiled once per Highway target: partial loads and stores,
//         widening of bf16 and f16, sums over lanes, exp.
// Edge:   partial loads and stores touch no byte outside the elements named, on every target.
#if defined(CARREL_KERNELS_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_SIMD_MATH_INL_H_
#undef CARREL_KERNELS_SIMD_MATH_INL_H_
#else
#define CARREL_KERNELS_SIMD_MATH_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

// The first `count` < Lanes elements at p, the other lanes zero.
HWY_INLINE FloatVec LoadPartial(FloatTag d, const float* p, int64_t count) {
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(float));
  return hn::Load(d, lanes);
}

HWY_INLINE void StorePartial(FloatTag d, FloatVec v, float* p, int64_t count) {
  HWY_ALIGN float lanes[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(v, d, lanes);
  std::memcpy(p, lanes, static_cast<size_t>(count) * sizeof(float));
}

// Element types of rows: Load widens Lanes elements from `index` on, LoadPartial fewer. Rows may
// lie at any byte address.
template <class Element, int64_t bytes>
struct ElementOf {
  static constexpr int64_t kBytes = bytes;
  static HWY_INLINE FloatVec LoadPartial(FloatTag d, const uint8_t* row, int64_t index,
                                         int64_t count) {
    HWY_ALIGN uint8_t lanes[HWY_MAX_BYTES] = {};
    std::memcpy(lanes, row + kBytes * index, static_cast<size_t>(count * kBytes));
    return Element::Load(d, lanes, 0);
  }
};

struct F32Element : ElementOf<F32Element, 4> {
  static HWY_INLINE FloatVec Load(FloatTag d, const uint8_t* row, int64_t index) {
    return hn::LoadU(d, reinterpret_cast<const float*>(row + kBytes * index));
  }
};

struct Bf16Element : ElementOf<Bf16Element, 2> {
  static HWY_INLINE FloatVec Load(FloatTag d, const uint8_t* row, int64_t index) {
    const hn::Rebind<uint16_t, FloatTag> d16;
    const hn::Rebind<uint32_t, FloatTag> d32;
    const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(row + kBytes * index));
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
  }
};

struct F16Element : ElementOf<F16Element, 2> {
  static HWY_INLINE FloatVec Load(FloatTag d, const uint8_t* row, int64_t index) {
    const hn::Rebind<uint16_t, FloatTag> d16;
    const hn::Rebind<hwy::float16_t, FloatTag> df16;
    const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(row + kBytes * index));
    return hn::PromoteTo(d, hn::BitCast(df16, bits));
  }
};

// e^x: relative error <= 2e-7 for -87 <= x <= 88; exactly 0 below -87.3, +inf from 88.8 on, NaN for
// NaN, exactly 1 for 0. n = round(x / ln 2), r = x - n ln 2 in two steps (Cody and Waite), and a
// polynomial in r of degree 6, fitted at the Chebyshev nodes of |r| <= ln(2) / 2.
HWY_INLINE FloatVec Exp(FloatTag d, FloatVec x) {
#if HWY_TARGET <= HWY_AVX3
  x = FloatVec{_mm512_min_ps(_mm512_set1_ps(89.0f), x.raw)};  // the second where one is NaN
#endif
  const FloatVec n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
  FloatVec r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  FloatVec p = hn::Set(d, 0.00139262504f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.00836323295f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0416665524f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.166665763f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(p, hn::Mul(r, r), r);
  p = hn::Add(p, hn::Set(d, 1.0f));
  // Times 2^n.
#if HWY_TARGET <= HWY_AVX3
  const __mmask16 counts = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
  return FloatVec{_mm512_maskz_scalef_ps(counts, p.raw, n.raw)};
#else
  const hn::RebindToSigned<FloatTag> di;
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
  // The product, unlike an addition to the exponent's bits, keeps NaN.
  p = hn::Mul(p, hn::BitCast(d, exponent));
  p = hn::IfThenElse(hn::Gt(x, hn::Set(d, 88.0f)), hn::Inf(d), p);
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3f)), p);
#endif
}

// The same for x <= 0, -inf included; the relative error is at most 2e-7 + 8e-8 |x|. With AVX-512 two
// thirds of the work: 2^y is p(y - floor(y)) 2^floor(y), and two instructions take floors. p has degree 5,
// its relative error is the least on [0, 1).
HWY_INLINE FloatVec ExpBelow(FloatTag d, FloatVec x) {
#if HWY_TARGET <= HWY_AVX3
  constexpr int kMinusFloor = 0x9;  // y - floor(y), exceptions off
  const FloatVec y = hn::Mul(x, hn::Set(d, 1.44269504f));
  const FloatVec r{_mm512_reduce_ps(y.raw, kMinusFloor)};
  FloatVec p = hn::Set(d, 0.00186713009f);
  p = hn::MulAdd(p, r, hn::Set(d, 0.00901703028f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0557999132f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.24016445f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.693151312f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const __mmask16 counts = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
  return FloatVec{_mm512_maskz_scalef_ps(counts, p.raw, y.raw)};
#else
  return Exp(d, x);
#endif
}

#if HWY_TARGET != HWY_SCALAR

// In each block of four lanes, the sums of a's, b's, c's and e's lanes there.
template <class V>
HWY_INLINE V BlockSums4(V a, V b, V c, V e) {
  const hn::DFromV<V> d;
  const hn::RepartitionToWide<decltype(d)> dw;
  const V ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const V ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto ab_wide = hn::BitCast(dw, ab), ce_wide = hn::BitCast(dw, ce);
  return hn::Add(hn::BitCast(d, hn::InterleaveLower(dw, ab_wide, ce_wide)),
                 hn::BitCast(d, hn::InterleaveUpper(dw, ab_wide, ce_wide)));
}

// As many results of BlockSums4 as a vector has blocks: block i = the sum of v[i]'s blocks, taken in
// the order of SumOfLanes4.
template <class V, size_t kBlocks>
HWY_INLINE V AddBlocks(const V (&v)[kBlocks]) {
  const hn::DFromV<V> d;
  if constexpr (kBlocks == 4) {
    const V v02 = hn::Add(hn::ConcatLowerLower(d, v[2], v[0]), hn::ConcatUpperUpper(d, v[2], v[0]));
    const V v13 = hn::Add(hn::ConcatLowerLower(d, v[3], v[1]), hn::ConcatUpperUpper(d, v[3], v[1]));
    return hn::Add(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(v13), v02),
                   hn::OddEvenBlocks(v13, hn::SwapAdjacentBlocks(v02)));
  } else if constexpr (kBlocks == 2) {
    return hn::Add(hn::ConcatLowerLower(d, v[1], v[0]), hn::ConcatUpperUpper(d, v[1], v[0]));
  } else {
    return v[0];
  }
}

#endif

// out[0..4) = the sums over the lanes of a, b, c and e, each taken in the same order.
template <class V>
HWY_INLINE void SumOfLanes4(V a, V b, V c, V e, float* out) {
#if HWY_TARGET == HWY_SCALAR
  out[0] = hn::GetLane(a);
  out[1] = hn::GetLane(b);
  out[2] = hn::GetLane(c);
  out[3] = hn::GetLane(e);
#else
  const hn::DFromV<V> d;
  const V sums = BlockSums4(a, b, c, e);
  const hn::FixedTag<float, 4> d4;
  if constexpr (sizeof(V) == 64) {
    const hn::Half<decltype(d)> dh;
    const auto half = hn::Add(hn::LowerHalf(dh, sums), hn::UpperHalf(dh, sums));
    hn::StoreU(hn::Add(hn::LowerHalf(d4, half), hn::UpperHalf(d4, half)), d4, out);
  } else if constexpr (sizeof(V) == 32) {
    hn::StoreU(hn::Add(hn::LowerHalf(d4, sums), hn::UpperHalf(d4, sums)), d4, out);
  } else {
    hn::StoreU(sums, d4, out);
  }
#endif
}

HWY_INLINE float SumOfLanes1(FloatTag d, FloatVec v) { return hn::GetLane(hn::SumOfLanes(d, v)); }

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
