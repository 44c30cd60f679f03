#include "kernels/layer/gelu_mul/gelu_mul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layer/gelu_mul/gelu_mul.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/gate_mul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

void GeluMulImpl(float* gate, const float* up, int64_t count) {
  // -2 u; the cube of a large gate is infinite, and its exp 0 or the largest: never NaN.
  GateMul(gate, up, count, [](FloatTag d, FloatVec g) HWY_ATTR {
    const FloatVec inner = hn::MulAdd(hn::Mul(g, g), hn::Set(d, -2 * 0.7978845608f * 0.044715f),
                                      hn::Set(d, -2 * 0.7978845608f));
    return hn::Mul(inner, g);
  });
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
