// What:   maxima and sums of exponentials of scores, and attention from scores over rows that lie
//         anywhere.
// Math:   AttendRows: out[h] = sum_j softmax_j(scores[h, j]) row[j];  lse[h] = ln sum_j
//         exp(scores[h, j]). The exponentials are fp32; sums over more than kSumBlock are fp64.
// Edge:   no scores, or all -inf: out = 0, lse = -inf.
#if defined(CARREL_KERNELS_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_SOFTMAX_INL_H_
#undef CARREL_KERNELS_SOFTMAX_INL_H_
#else
#define CARREL_KERNELS_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "kernels/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// Terms summed in fp32 before the sum goes on in fp64.
inline constexpr int64_t kSumBlock = 256;

// Rows that AttendRows weighs at a time: they and the next ones, asked for meanwhile, fit the L1
// cache.
inline constexpr int64_t kRowBlock = 64;

// -inf for none.
HWY_INLINE float MaxOf(const float* x, int64_t count) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  float max = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  if (count >= 2 * lanes) {
    FloatVec max0 = hn::LoadU(d, x), max1 = hn::LoadU(d, x + lanes);
    for (i = 2 * lanes; i + 2 * lanes <= count; i += 2 * lanes) {
      max0 = hn::Max(max0, hn::LoadU(d, x + i));
      max1 = hn::Max(max1, hn::LoadU(d, x + i + lanes));
    }
    max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(max0, max1)));
  }
  for (; i < count; ++i) max = std::max(max, x[i]);
  return max;
}

// sum_j exp(x[j] - shift) over at most kSumBlock scores, shift >= all; the terms go to `terms` unless null.
HWY_INLINE float ExpSum(const float* x, int64_t count, float shift, float* terms) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec shifts = hn::Set(d, shift);
  FloatVec sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const FloatVec term = ExpBelow(d, hn::Sub(hn::LoadU(d, x + i), shifts));
    if (terms != nullptr) hn::StoreU(term, d, terms + i);
    sum = hn::Add(sum, term);
  }
  if (i < count) {
    const FloatVec term =
        hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(count - i)),
                           ExpBelow(d, hn::Sub(LoadPartial(d, x + i, count - i), shifts)));
    if (terms != nullptr) StorePartial(d, term, terms + i, count - i);
    sum = hn::Add(sum, term);
  }
  return SumOfLanes1(d, sum);
}

// The shift that keeps exponentials in range: the maximum, or 0 where exp(-inf - -inf) would be
// NaN.
HWY_INLINE float SoftmaxShift(const float* scores, int64_t count) {
  const float max = MaxOf(scores, count);
  return max == -std::numeric_limits<float>::infinity() ? 0.0f : max;
}

// Heads that share one pass over the rows.
inline constexpr int64_t kHeadsPerPass = 16;

template <class Rows>
HWY_INLINE void AttendHeads(const Rows& rows, int64_t count, int64_t dim, const float* scores,
                            int64_t score_stride, int64_t heads, float* out, float* lse) {
  float weights[kHeadsPerPass * kRowBlock];
  float shift[kHeadsPerPass];
  double sum[kHeadsPerPass] = {};
  for (int64_t h = 0; h < heads; ++h) shift[h] = SoftmaxShift(scores + h * score_stride, count);
  std::fill_n(out, heads * dim, 0.0f);
  for (int64_t j = 0; j < count; j += kRowBlock) {
    const int64_t block = std::min(kRowBlock, count - j);
    for (int64_t h = 0; h < heads; ++h) {
      const float* at = scores + h * score_stride + j;
      // Many streams in short runs, which the hardware does not foresee.
      const int64_t later = std::min(2 * kRowBlock, count - j);
      for (int64_t i = kRowBlock; i < later; i += 16) hwy::Prefetch(at + i);
      sum[h] += ExpSum(at, block, shift[h], weights + h * kRowBlock);
    }
    AddWeightedRows(rows, j, j + block, count, dim, StridedWeights{weights, kRowBlock, j}, heads,
                    out, dim);
  }
  for (int64_t h = 0; h < heads; ++h) {
    lse[h] = static_cast<float>(shift[h] + std::log(sum[h]));
    const float factor = sum[h] == 0 ? 0.0f : static_cast<float>(1.0 / sum[h]);
    for (int64_t c = 0; c < dim; ++c) out[h * dim + c] *= factor;
  }
}

template <class Rows>
HWY_INLINE void AttendRows(const Rows& rows, int64_t count, int64_t dim, const float* scores,
                           int64_t score_stride, int64_t heads, float* out, float* lse) {
  for (int64_t h = 0; h < heads; h += kHeadsPerPass) {
    AttendHeads(rows, count, dim, scores + h * score_stride, score_stride,
                std::min(kHeadsPerPass, heads - h), out + h * dim, lse + h);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
