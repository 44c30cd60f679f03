#include "kernels/score/softmax_concentration/softmax_concentration.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score/softmax_concentration/softmax_concentration.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// Weights that are sorted rather than halved again.
inline constexpr int64_t kSortedWeights = 64;

struct WeightSums {
  double sum = 0, weighted = 0;  // of exp(s - max), and of (s - max) times it
};

// weights[i] = exp(scores[i] - max).
WeightSums TakeWeights(const float* scores, int64_t count, float max, float* weights) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec shift = hn::Set(d, max);
  WeightSums sums;
  for (int64_t begin = 0; begin < count; begin += kSumBlock) {
    const int64_t end = std::min(count, begin + kSumBlock);
    FloatVec sum = hn::Zero(d), weighted = hn::Zero(d);
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      const FloatVec s = hn::Sub(hn::LoadU(d, scores + i), shift);
      const FloatVec e = Exp(d, s);
      hn::StoreU(e, d, weights + i);
      sum = hn::Add(sum, e);
      weighted = hn::MulAdd(s, e, weighted);
    }
    if (i < end) {
      const auto real = hn::FirstN(d, static_cast<size_t>(end - i));
      const FloatVec s =
          hn::IfThenElseZero(real, hn::Sub(LoadPartial(d, scores + i, end - i), shift));
      const FloatVec e = hn::IfThenElseZero(real, Exp(d, s));
      StorePartial(d, e, weights + i, end - i);
      sum = hn::Add(sum, e);
      weighted = hn::MulAdd(s, e, weighted);
    }
    sums.sum += SumOfLanes1(d, sum);
    sums.weighted += SumOfLanes1(d, weighted);
  }
  return sums;
}

struct Heaviest {
  double mass = 0;
  int64_t count = 0;
};

// Of the weights above `bar`.
Heaviest Above(const float* weights, int64_t count, float bar) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec bars = hn::Set(d, bar);
  Heaviest all;
  for (int64_t begin = 0; begin < count; begin += kSumBlock) {
    const int64_t end = std::min(count, begin + kSumBlock);
    FloatVec mass = hn::Zero(d), number = hn::Zero(d);
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      const FloatVec w = hn::LoadU(d, weights + i);
      const auto above = hn::Gt(w, bars);
      mass = hn::Add(mass, hn::IfThenElseZero(above, w));
      number = hn::Add(number, hn::IfThenElseZero(above, hn::Set(d, 1.0f)));
    }
    all.mass += SumOfLanes1(d, mass);
    all.count += static_cast<int64_t>(SumOfLanes1(d, number));
    for (; i < end; ++i) {
      if (!(weights[i] > bar)) continue;
      all.mass += weights[i];
      ++all.count;
    }
  }
  return all;
}

// Keeps the weights above `low` and not above `high`; returns their number.
int64_t KeepBetween(float* weights, int64_t count, float low, float high) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec lows = hn::Set(d, low), highs = hn::Set(d, high);
  int64_t kept = 0, i = 0;
  for (; i + lanes <= count; i += lanes) {
    const FloatVec w = hn::LoadU(d, weights + i);
    const auto between = hn::And(hn::Gt(w, lows), hn::Le(w, highs));
    // Never beyond what was read.
    kept += static_cast<int64_t>(hn::CompressStore(w, between, d, weights + kept));
  }
  for (; i < count; ++i) {
    const float w = weights[i];
    if (w > low && w <= high) weights[kept++] = w;
  }
  return kept;
}

// The least number of weights that sum to `wanted` of `sum`. Weights are positive or zero, at most
// 1; they change places and some are lost.
int64_t LeastThatCarry(float* weights, int64_t count, double wanted, double sum) {
  // The last weight that counts is above `low` and not above `high`. Those that are not above the
  // first bar sum to less than what is not wanted.
  const double rest = (sum - wanted) / static_cast<double>(count);
  uint32_t low = std::bit_cast<uint32_t>(static_cast<float>(0.999 * rest));
  uint32_t high = std::bit_cast<uint32_t>(1.0f);
  Heaviest above_high, lost;  // lost: above `high`, and no longer among the weights
  int64_t above_low = count;
  while (high > low + 1 && above_low - above_high.count > kSortedWeights) {
    const uint32_t middle = low + (high - low) / 2;
    Heaviest above = Above(weights, count, std::bit_cast<float>(middle));
    above.mass += lost.mass;
    above.count += lost.count;
    if (above.mass >= wanted) {
      low = middle;
      above_low = above.count;
    } else {
      high = middle;
      above_high = above;
    }
    if (above_low - above_high.count < count / 2) {
      count = KeepBetween(weights, count, std::bit_cast<float>(low), std::bit_cast<float>(high));
      lost = above_high;
    }
  }
  count = KeepBetween(weights, count, std::bit_cast<float>(low), std::bit_cast<float>(high));
  if (high > low + 1) std::sort(weights, weights + count, std::greater<float>());  // else all equal
  double mass = above_high.mass;
  int64_t used = 0;
  for (; used < count && mass < wanted; ++used) mass += weights[used];
  return above_high.count + used;
}

Concentration SoftmaxConcentrationImpl(const float* scores, int64_t count, double share,
                                       float* scratch) {
  const WeightSums sums = TakeWeights(scores, count, SoftmaxShift(scores, count), scratch);
  return {.entropy_nats = std::log(sums.sum) - sums.weighted / sums.sum,
          .elements = LeastThatCarry(scratch, count, share * sums.sum, sums.sum)};
}

#else

Concentration SoftmaxConcentrationImpl(const float* scores, int64_t count, double share,
                                       float* scratch) {
  return RefSoftmaxConcentration(scores, count, share, scratch);
}

#endif

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(SoftmaxConcentrationImpl);

Concentration SoftmaxConcentration(const float* scores, int64_t count, double share,
                                   float* scratch) {
  return HWY_DYNAMIC_DISPATCH(SoftmaxConcentrationImpl)(scores, count, share, scratch);
}

}  // namespace carrel::kernels
#endif
