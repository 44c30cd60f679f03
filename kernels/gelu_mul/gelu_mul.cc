#include "kernels/gelu_mul/gelu_mul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gelu_mul/gelu_mul.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

HWY_INLINE FloatVec GeluTimes(FloatTag d, FloatVec gate, FloatVec up) {
  // -2 u; the cube of a large gate is infinite, and its exp 0 or the largest: never NaN.
  const FloatVec square = hn::Mul(gate, gate);
  const FloatVec inner = hn::MulAdd(square, hn::Set(d, -2 * 0.7978845608f * 0.044715f),
                                    hn::Set(d, -2 * 0.7978845608f));
  const FloatVec divisor = hn::Add(hn::Set(d, 1.0f), Exp(d, hn::Mul(inner, gate)));
  return hn::Mul(hn::Div(gate, divisor), up);
}

void GeluMulImpl(float* gate, const float* up, int64_t count) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(GeluTimes(d, hn::LoadU(d, gate + i), hn::LoadU(d, up + i)), d, gate + i);
  }
  if (i < count) {
    const int64_t tail = count - i;
    StorePartial(d, GeluTimes(d, LoadPartial(d, gate + i, tail), LoadPartial(d, up + i, tail)),
                 gate + i, tail);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(GeluMulImpl);

void GeluMul(float* gate, const float* up, int64_t count) {
  HWY_DYNAMIC_DISPATCH(GeluMulImpl)(gate, up, count);
}

}  // namespace carrel::kernels
#endif
