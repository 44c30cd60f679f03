// Candidates are (score, index) packed into one integer each, so that the smaller is the better. A
// vector scan appends only what beats the k-th best so far; whenever the room is full it is cut
// back to the best k, which raises the bar. A later score equal to the bar loses its tie by index,
// so the scan may ask for strictly greater.
#include "kernels/topk/topk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/topk/topk.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// Appends to out the indices from `begin` on whose score is greater than bar, until none is left or
// fewer than 64 places are; returns where it stopped.
int64_t ScanAboveImpl(const float* scores, int64_t begin, int64_t n, float bar, uint32_t* out,
                      int64_t places, int64_t* written) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec bars = hn::Set(d, bar);
  int64_t i = begin, count = 0;
  const auto append = [&](int64_t at, auto mask) HWY_ATTR {
    uint8_t bytes[8] = {};
    hn::StoreMaskBits(d, mask, bytes);
    uint64_t bits;
    std::memcpy(&bits, bytes, sizeof(bits));
    for (; bits != 0; bits &= bits - 1) {
      out[count++] = static_cast<uint32_t>(at + std::countr_zero(bits));
    }
  };
  for (; i + 4 * lanes <= n && count + 64 <= places; i += 4 * lanes) {
    const auto m0 = hn::Gt(hn::LoadU(d, scores + i), bars);
    const auto m1 = hn::Gt(hn::LoadU(d, scores + i + lanes), bars);
    const auto m2 = hn::Gt(hn::LoadU(d, scores + i + 2 * lanes), bars);
    const auto m3 = hn::Gt(hn::LoadU(d, scores + i + 3 * lanes), bars);
    if (hn::AllFalse(d, hn::Or(hn::Or(m0, m1), hn::Or(m2, m3)))) continue;
    append(i, m0);
    append(i + lanes, m1);
    append(i + 2 * lanes, m2);
    append(i + 3 * lanes, m3);
  }
  if (i + 4 * lanes > n) {
    for (; i < n && count < places; ++i) {
      if (scores[i] > bar) out[count++] = static_cast<uint32_t>(i);
    }
  }
  *written = count;
  return i;
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(ScanAboveImpl);

namespace {

// Places beyond k, at least: fewer mean more cuts, more mean a lower bar for longer.
constexpr int64_t kMinSlack = 256;

float Value(float score) { return std::isnan(score) ? -INFINITY : score + 0.0f; }

// Ascending order of what it returns is (score descending, index ascending).
uint64_t Pack(const float* scores, uint32_t index) {
  const auto bits = std::bit_cast<uint32_t>(Value(scores[index]));
  const uint32_t ascending = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | index;
}

uint32_t IndexOf(uint64_t packed) { return static_cast<uint32_t>(packed); }

}  // namespace

int64_t TopK(const float* scores, int64_t n, int64_t k, int64_t* out,
             std::vector<uint64_t>& scratch) {
  k = std::min(k, n);
  if (k <= 0) return 0;
  const int64_t capacity = std::min(n, k + std::max(k, kMinSlack));
  // Behind the candidates, room for the indices that a scan appends.
  if (static_cast<int64_t>(scratch.size()) < capacity + capacity / 2 + 1) {
    scratch.resize(static_cast<size_t>(capacity + capacity / 2 + 1));
  }
  uint64_t* candidates = scratch.data();
  auto* appended = reinterpret_cast<uint32_t*>(candidates + capacity);
  for (int64_t i = 0; i < capacity; ++i) candidates[i] = Pack(scores, static_cast<uint32_t>(i));
  int64_t count = capacity, next = capacity;
  for (;;) {
    if (count > k) std::nth_element(candidates, candidates + k - 1, candidates + count);
    count = k;
    if (next == n) break;
    int64_t written = 0;
    next = HWY_DYNAMIC_DISPATCH(ScanAboveImpl)(scores, next, n,
                                               Value(scores[IndexOf(candidates[k - 1])]), appended,
                                               capacity - k, &written);
    for (int64_t i = 0; i < written; ++i) candidates[count++] = Pack(scores, appended[i]);
  }
  std::sort(candidates, candidates + k);
  for (int64_t i = 0; i < k; ++i) out[i] = IndexOf(candidates[i]);
  return k;
}

std::vector<int64_t> BestIndices(const std::vector<float>& scores, int64_t k) {
  thread_local std::vector<uint64_t> scratch;
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<int64_t> best(static_cast<size_t>(std::min(n, k)));
  if (k >= n) {
    std::iota(best.begin(), best.end(), 0);
    return best;
  }
  best.resize(static_cast<size_t>(TopK(scores.data(), n, k, best.data(), scratch)));
  std::sort(best.begin(), best.end());
  return best;
}

}  // namespace carrel::kernels
#endif
