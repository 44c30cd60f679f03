#include "kernels/layer/rms_norm/rms_norm.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layer/rms_norm/rms_norm.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

HWY_INLINE float SumOfSquares(const float* x, int64_t dim) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  FloatVec sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t c = 0;
  for (; c + 2 * lanes <= dim; c += 2 * lanes) {
    const FloatVec v0 = hn::LoadU(d, x + c), v1 = hn::LoadU(d, x + c + lanes);
    sum0 = hn::MulAdd(v0, v0, sum0);
    sum1 = hn::MulAdd(v1, v1, sum1);
  }
  for (; c < dim; c += lanes) {
    const FloatVec v = LoadPartial(d, x + c, std::min(lanes, dim - c));
    sum0 = hn::MulAdd(v, v, sum0);
  }
  return SumOfLanes1(d, hn::Add(sum0, sum1));
}

void RmsNormImpl(const float* x, int64_t n, int64_t dim, int64_t x_stride, const float* w,
                 float eps, float* y, int64_t y_stride) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < n; ++i, x += x_stride, y += y_stride) {
    const float factor = 1.0f / std::sqrt(SumOfSquares(x, dim) / static_cast<float>(dim) + eps);
    const FloatVec factors = hn::Set(d, factor);
    int64_t c = 0;
    for (; c + lanes <= dim; c += lanes) {
      const FloatVec v = hn::Mul(hn::LoadU(d, x + c), factors);
      hn::StoreU(hn::Mul(v, hn::LoadU(d, w + c)), d, y + c);
    }
    for (; c < dim; ++c) y[c] = x[c] * factor * w[c];
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(RmsNormImpl);

void RmsNorm(const float* x, int64_t n, int64_t dim, int64_t x_stride, const float* w, float eps,
             float* y, int64_t y_stride) {
  HWY_DYNAMIC_DISPATCH(RmsNormImpl)(x, n, dim, x_stride, w, eps, y, y_stride);
}

}  // namespace carrel::kernels
#endif
