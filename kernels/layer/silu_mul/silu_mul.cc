#include "kernels/layer/silu_mul/silu_mul.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layer/silu_mul/silu_mul.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/gate_mul-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

void SiluMulImpl(float* gate, const float* up, int64_t count) {
  GateMul(gate, up, count, [](FloatTag, FloatVec g) HWY_ATTR { return hn::Neg(g); });
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
