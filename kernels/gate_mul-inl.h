// What:   the gates of gated MLPs (silu_mul, gelu_mul), compiled once per Highway target.
// Math:   gate[i] <- gate[i] / (1 + exp(x)) * up[i], x made of gate[i].
#if defined(CARREL_KERNELS_GATE_MUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_GATE_MUL_INL_H_
#undef CARREL_KERNELS_GATE_MUL_INL_H_
#else
#define CARREL_KERNELS_GATE_MUL_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// exponent(d, gate) -> x
template <class Exponent>
HWY_INLINE void GateMul(float* gate, const float* up, int64_t count, Exponent exponent) {
  const FloatTag d;
  const auto times = [&](FloatVec g, FloatVec u) HWY_ATTR {
    const FloatVec divisor = hn::Add(hn::Set(d, 1.0f), Exp(d, exponent(d, g)));
    return hn::Mul(hn::Div(g, divisor), u);
  };
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(times(hn::LoadU(d, gate + i), hn::LoadU(d, up + i)), d, gate + i);
  }
  if (i < count) {
    const int64_t tail = count - i;
    StorePartial(d, times(LoadPartial(d, gate + i, tail), LoadPartial(d, up + i, tail)), gate + i,
                 tail);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_KERNELS_GATE_MUL_INL_H_
