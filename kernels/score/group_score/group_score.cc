#include "kernels/score/group_score/group_score.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score/group_score/group_score.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

void GroupScoreImpl(const float* scores, int64_t group, int64_t rows, int64_t stride,
                    const float* base, float* out) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t j = 0;
  for (; j + lanes <= rows; j += lanes) {
    FloatVec best = hn::Sub(hn::LoadU(d, scores + j), hn::Set(d, base[0]));
    for (int64_t h = 1; h < group; ++h) {
      best = hn::Max(best, hn::Sub(hn::LoadU(d, scores + h * stride + j), hn::Set(d, base[h])));
    }
    hn::StoreU(best, d, out + j);
  }
  for (; j < rows; ++j) {
    float best = scores[j] - base[0];
    for (int64_t h = 1; h < group; ++h) best = std::max(best, scores[h * stride + j] - base[h]);
    out[j] = best;
  }
}

LsePart LsePartImpl(const float* scores, int64_t rows) {
  LsePart all{.max = MaxOf(scores, rows), .sum = 0};
  if (std::isinf(all.max)) return all;
  for (int64_t j = 0; j < rows; j += kSumBlock) {
    all.sum += ExpSum(scores + j, std::min(kSumBlock, rows - j), all.max, nullptr);
  }
  return all;
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(GroupScoreImpl);
HWY_EXPORT(LsePartImpl);

void GroupScore(const float* scores, int64_t group, int64_t rows, int64_t stride, const float* base,
                float* out) {
  HWY_DYNAMIC_DISPATCH(GroupScoreImpl)(scores, group, rows, stride, base, out);
}

LsePart LsePartOf(const float* scores, int64_t rows) {
  return HWY_DYNAMIC_DISPATCH(LsePartImpl)(scores, rows);
}

float LogSumExp(const float* scores, int64_t rows) {
  const LsePart all = LsePartOf(scores, rows);
  return std::isinf(all.max) ? all.max : static_cast<float>(all.max + std::log(all.sum));
}

float LogSumExp(const LsePart* parts, int64_t count, int64_t stride) {
  LsePart all;
  for (int64_t i = 0; i < count; ++i) all.max = std::max(all.max, parts[i * stride].max);
  if (std::isinf(all.max)) return all.max;
  for (int64_t i = 0; i < count; ++i) {
    const LsePart& part = parts[i * stride];
    all.sum += part.sum * std::exp(double{part.max} - all.max);
  }
  return static_cast<float>(all.max + std::log(all.sum));
}

}  // namespace carrel::kernels
#endif
