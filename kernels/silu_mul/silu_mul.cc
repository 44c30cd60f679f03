#include "kernels/silu_mul/silu_mul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/silu_mul/silu_mul.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

HWY_INLINE FloatVec SiluTimes(FloatTag d, FloatVec gate, FloatVec up) {
  const FloatVec divisor = hn::Add(hn::Set(d, 1.0f), Exp(d, hn::Neg(gate)));
  return hn::Mul(hn::Div(gate, divisor), up);
}

void SiluMulImpl(float* gate, const float* up, int64_t count) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(SiluTimes(d, hn::LoadU(d, gate + i), hn::LoadU(d, up + i)), d, gate + i);
  }
  if (i < count) {
    const int64_t tail = count - i;
    StorePartial(d, SiluTimes(d, LoadPartial(d, gate + i, tail), LoadPartial(d, up + i, tail)),
                 gate + i, tail);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(SiluMulImpl);

void SiluMul(float* gate, const float* up, int64_t count) {
  HWY_DYNAMIC_DISPATCH(SiluMulImpl)(gate, up, count);
}

}  // namespace carrel::kernels
#endif
