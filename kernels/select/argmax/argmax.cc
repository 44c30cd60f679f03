#include "kernels/select/argmax/argmax.h"

#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/select/argmax/argmax.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// The place of `max`, which is somewhere in x or, where all are NaN, nowhere.
int32_t Find(const float* x, int64_t count, float max) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec wanted = hn::Set(d, max);
  int64_t j = 0;
  for (; j + lanes <= count; j += lanes) {
    const intptr_t lane = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, x + j), wanted));
    if (lane >= 0) return static_cast<int32_t>(j + lane);
  }
  for (; j < count; ++j) {
    if (x[j] == max) return static_cast<int32_t>(j);
  }
  return 0;
}

void ArgmaxRowsImpl(const float* x, int64_t n, int64_t count, int32_t* id) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i, x += count) {
    FloatVec best = hn::Set(d, kLowest);
    int64_t j = 0;
    for (; j + lanes <= count; j += lanes) {
      const FloatVec here = hn::LoadU(d, x + j);
      best = hn::IfThenElse(hn::Gt(here, best), here, best);
    }
    float max = hn::GetLane(hn::MaxOfLanes(d, best));
    for (; j < count; ++j) max = x[j] > max ? x[j] : max;
    id[i] = Find(x, count, max);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(ArgmaxRowsImpl);

void ArgmaxRows(const float* x, int64_t n, int64_t count, int32_t* id) {
  HWY_DYNAMIC_DISPATCH(ArgmaxRowsImpl)(x, n, count, id);
}

}  // namespace carrel::kernels
#endif
