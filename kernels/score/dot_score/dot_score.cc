#include "kernels/score/dot_score/dot_score.h"

#include <algorithm>

#include "common/thread_pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score/dot_score/dot_score.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

void DotScoreImpl(const float* q, int64_t group, int64_t head_dim, const void* k, int64_t rows,
                  float scale, float* scores, int64_t score_stride) {
  const ContiguousRows<Bf16Element> contiguous{k, head_dim};
  ScoreRows(contiguous, rows, head_dim, q, group, head_dim, scale, scores, score_stride);
}

void DotScoreRowsImpl(const float* q, int64_t group, int64_t head_dim, const void* const* k,
                      int64_t rows, float scale, float* scores, int64_t score_stride) {
  const ScatteredRows<Bf16Element> scattered{k, head_dim};
  ScoreRows(scattered, rows, head_dim, q, group, head_dim, scale, scores, score_stride);
}

// Sums of even and of odd elements: a bf16 pair is widened by one shift and one mask.
float DotBf16Impl(const void* a, const void* b, int64_t head_dim) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* x = static_cast<const uint8_t*>(a);
  const auto* y = static_cast<const uint8_t*>(b);
  const auto high = hn::Set(du, 0xffff0000u);
  FloatVec even = hn::Zero(d), odd = hn::Zero(d);
  const auto add = [&](auto u, auto v) HWY_ATTR {
    even = hn::MulAdd(hn::BitCast(d, hn::ShiftLeft<16>(u)), hn::BitCast(d, hn::ShiftLeft<16>(v)),
                      even);
    odd = hn::MulAdd(hn::BitCast(d, hn::And(u, high)), hn::BitCast(d, hn::And(v, high)), odd);
  };
  int64_t c = 0;
  for (; c + 2 * lanes <= head_dim; c += 2 * lanes) {
    add(hn::LoadU(du, reinterpret_cast<const uint32_t*>(x + 2 * c)),
        hn::LoadU(du, reinterpret_cast<const uint32_t*>(y + 2 * c)));
  }
  if (c < head_dim) {
    HWY_ALIGN uint32_t u[HWY_MAX_BYTES / 4] = {};
    HWY_ALIGN uint32_t v[HWY_MAX_BYTES / 4] = {};
    std::memcpy(u, x + 2 * c, static_cast<size_t>(2 * (head_dim - c)));
    std::memcpy(v, y + 2 * c, static_cast<size_t>(2 * (head_dim - c)));
    add(hn::Load(du, u), hn::Load(du, v));
  }
  return SumOfLanes1(d, hn::Add(even, odd));
}

float DotF32Bf16Impl(const float* q, const void* k, int64_t head_dim) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* row = static_cast<const uint8_t*>(k);
  FloatVec sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  int64_t c = 0;
  for (; c + 2 * lanes <= head_dim; c += 2 * lanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, q + c), Bf16Element::Load(d, row, c), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, q + c + lanes), Bf16Element::Load(d, row, c + lanes), sum1);
  }
  for (; c < head_dim; c += lanes) {
    const int64_t tail = std::min(lanes, head_dim - c);
    sum0 = hn::MulAdd(LoadPartial(d, q + c, tail), Bf16Element::LoadPartial(d, row, c, tail), sum0);
  }
  return SumOfLanes1(d, hn::Add(sum0, sum1));
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/score/dot_score/dot_score_amx.h"

namespace carrel::kernels {

HWY_EXPORT(DotScoreImpl);
HWY_EXPORT(DotScoreRowsImpl);
HWY_EXPORT(DotBf16Impl);
HWY_EXPORT(DotF32Bf16Impl);

namespace {

// Makes the choice now: until then the tables lead to a function that chooses at every call.
void ChooseTarget() { hwy::GetChosenTarget().Update(hwy::SupportedTargets()); }

}  // namespace

void DotScore(const float* q, int64_t group, int64_t head_dim, const void* k, int64_t rows,
              float scale, float* scores, int64_t score_stride) {
  if (TakesTiles(head_dim)) {
    return DotScoreInParts(q, group, head_dim, k, nullptr, rows, scale, scores, score_stride);
  }
  HWY_DYNAMIC_DISPATCH(DotScoreImpl)(q, group, head_dim, k, rows, scale, scores, score_stride);
}

void DotScoreRows(const float* q, int64_t group, int64_t head_dim, const void* const* k,
                  int64_t rows, float scale, float* scores, int64_t score_stride) {
  if (TakesTiles(head_dim)) {
    return DotScoreInParts(q, group, head_dim, nullptr, k, rows, scale, scores, score_stride);
  }
  HWY_DYNAMIC_DISPATCH(DotScoreRowsImpl)(q, group, head_dim, k, rows, scale, scores, score_stride);
}

void DotScoreRows(const float* q, int64_t group, int64_t head_dim, const void* const* k,
                  int64_t rows, float scale, float* scores, int64_t score_stride,
                  ThreadPool* pool) {
  constexpr int64_t kPartRows = 128;
  if (pool == nullptr || rows < 2 * kPartRows) {
    return DotScoreRows(q, group, head_dim, k, rows, scale, scores, score_stride);
  }
  pool->ParallelFor((rows + kPartRows - 1) / kPartRows, [&](int64_t part) {
    const int64_t begin = part * kPartRows;
    DotScoreRows(q, group, head_dim, k + begin, std::min(kPartRows, rows - begin), scale,
                 scores + begin, score_stride);
  });
}

float DotBf16(const void* a, const void* b, int64_t head_dim) {
  static const auto dot = (ChooseTarget(), &HWY_DYNAMIC_DISPATCH(DotBf16Impl));
  return dot(a, b, head_dim);
}

float DotF32Bf16(const float* q, const void* k, int64_t head_dim) {
  static const auto dot = (ChooseTarget(), &HWY_DYNAMIC_DISPATCH(DotF32Bf16Impl));
  return dot(q, k, head_dim);
}

}  // namespace carrel::kernels
#endif
