#include "kernels/layer/rope/rope.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layer/rope/rope.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// Pairs (low[c], high[c]) turn by the angles whose cosines and sines are given.
HWY_INLINE void Rotate(float* low, float* high, const float* cosines, const float* sines,
                       int64_t count) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t c = 0;
  for (; c + lanes <= count; c += lanes) {
    const FloatVec a = hn::LoadU(d, low + c), b = hn::LoadU(d, high + c);
    const FloatVec cosine = hn::LoadU(d, cosines + c), sine = hn::LoadU(d, sines + c);
    hn::StoreU(hn::NegMulAdd(b, sine, hn::Mul(a, cosine)), d, low + c);
    hn::StoreU(hn::MulAdd(a, sine, hn::Mul(b, cosine)), d, high + c);
  }
  for (; c < count; ++c) {
    const float a = low[c], b = high[c];
    low[c] = a * cosines[c] - b * sines[c];
    high[c] = b * cosines[c] + a * sines[c];
  }
}

void RopeImpl(float* x, int64_t n, int64_t heads, int64_t head_dim, int64_t first_position,
              const float* inv_freq) {
  constexpr int64_t kAngles = 64;  // cosines and sines of a token, shared by its heads
  float cosines[kAngles], sines[kAngles];
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < n; ++i) {
    const float position = static_cast<float>(first_position + i);
    for (int64_t begin = 0; begin < half; begin += kAngles) {
      const int64_t count = std::min(kAngles, half - begin);
      for (int64_t c = 0; c < count; ++c) {
        const float angle = position * inv_freq[begin + c];
        cosines[c] = std::cos(angle);
        sines[c] = std::sin(angle);
      }
      for (int64_t h = 0; h < heads; ++h) {
        float* low = x + (i * heads + h) * head_dim + begin;
        Rotate(low, low + half, cosines, sines, count);
      }
    }
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(RopeImpl);

void Rope(float* x, int64_t n, int64_t heads, int64_t head_dim, int64_t first_position,
          const float* inv_freq) {
  HWY_DYNAMIC_DISPATCH(RopeImpl)(x, n, heads, head_dim, first_position, inv_freq);
}

}  // namespace carrel::kernels
#endif
