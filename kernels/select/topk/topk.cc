// Candidates are (score, index) packed into one integer each, so that the smaller is the better. A
// vector scan appends only what beats a bar: first one that a sample suggests, and where that was
// too high, the k-th best so far; whenever the room is full it is cut back to the best k, which
// raises the bar. A later score equal to the bar loses its tie by index,
// so the scan may ask for strictly greater.
#include "kernels/select/topk/topk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "absl/types/span.h"
#include "kernels/select/sort_words/sort_words.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/select/topk/topk.cc"
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
// Scores looked at to choose a first bar, about.
constexpr int64_t kSample = 512;

float Value(float score) { return std::isnan(score) ? -INFINITY : score + 0.0f; }

// Ascending order of what it returns is (score descending, index ascending).
uint64_t Pack(const float* scores, uint32_t index) {
  const auto bits = std::bit_cast<uint32_t>(Value(scores[index]));
  const uint32_t ascending = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | index;
}

uint32_t IndexOf(uint64_t packed) { return static_cast<uint32_t>(packed); }

// A score that likely k others and not many more exceed, by a sample; -inf where none is known.
float SampledBar(const float* scores, int64_t n, int64_t k, std::vector<float>& sample) {
  const int64_t step = n / kSample;
  if (step < 2) return -INFINITY;
  sample.clear();
  for (int64_t i = step / 2; i < n; i += step) sample.push_back(Value(scores[i]));
  const double expected = static_cast<double>(k) / static_cast<double>(step);
  const auto rank = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 4);
  if (2 * rank > static_cast<int64_t>(sample.size())) return -INFINITY;
  std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<float>());
  return sample[static_cast<size_t>(rank)];
}

// The best k of n scores, 0 < k < n, packed: the k-th is the last, the others in no order. They stay
// in scratch.
absl::Span<uint64_t> Best(const float* scores, int64_t n, int64_t k,
                          std::vector<uint64_t>& scratch) {
  thread_local std::vector<float> sample;
  const int64_t capacity = std::min(n, k + std::max(k, kMinSlack));
  // Behind the candidates, room for the indices that a scan appends.
  if (static_cast<int64_t>(scratch.size()) < capacity + capacity / 2 + 1) {
    scratch.resize(static_cast<size_t>(capacity + capacity / 2 + 1));
  }
  uint64_t* const candidates = scratch.data();
  auto* const appended = reinterpret_cast<uint32_t*>(candidates + capacity);
  int64_t count = 0, next = 0;
  const auto scan = [&](float bar) {
    int64_t written = 0;
    next = HWY_DYNAMIC_DISPATCH(ScanAboveImpl)(scores, next, n, bar, appended, capacity - count,
                                               &written);
    for (int64_t i = 0; i < written; ++i) candidates[count++] = Pack(scores, appended[i]);
  };
  const float bar = SampledBar(scores, n, k, sample);
  if (bar > -INFINITY) scan(bar);
  if (count < k) {
    for (count = 0; count < capacity; ++count) {
      candidates[count] = Pack(scores, static_cast<uint32_t>(count));
    }
    next = capacity;
  }
  for (;;) {
    std::nth_element(candidates, candidates + k - 1, candidates + count);
    count = k;
    if (next == n) return {candidates, static_cast<size_t>(k)};
    scan(Value(scores[IndexOf(candidates[k - 1])]));
  }
}

}  // namespace

int64_t TopK(const float* scores, int64_t n, int64_t k, int64_t* out,
             std::vector<uint64_t>& scratch) {
  k = std::min(k, n);
  if (k <= 0) return 0;
  absl::Span<uint64_t> best;
  if (k < n) {
    best = Best(scores, n, k, scratch);
  } else {
    scratch.resize(std::max(scratch.size(), static_cast<size_t>(n)));
    best = {scratch.data(), static_cast<size_t>(n)};
    for (int64_t i = 0; i < n; ++i) {
      best[static_cast<size_t>(i)] = Pack(scores, static_cast<uint32_t>(i));
    }
  }
  SortWords(best.data(), k);
  for (int64_t i = 0; i < k; ++i) out[i] = IndexOf(best[static_cast<size_t>(i)]);
  return k;
}

float KthLargest(const float* scores, int64_t n, int64_t k, std::vector<uint64_t>& scratch) {
  if (k < n) return Value(scores[IndexOf(Best(scores, n, k, scratch).back())]);
  float least = INFINITY;
  for (int64_t i = 0; i < n; ++i) least = std::min(least, Value(scores[i]));
  return least;
}

void IndicesAtLeast(const float* scores, int64_t n, float bar, std::vector<int64_t>& out) {
  thread_local std::vector<uint32_t> appended(1024);
  out.clear();
  if (!(bar > -INFINITY)) {
    out.resize(static_cast<size_t>(n));
    std::iota(out.begin(), out.end(), 0);
    return;
  }
  const float below = std::nextafter(bar, -INFINITY);
  for (int64_t next = 0; next < n;) {
    int64_t written = 0;
    next = HWY_DYNAMIC_DISPATCH(ScanAboveImpl)(scores, next, n, below, appended.data(),
                                               static_cast<int64_t>(appended.size()), &written);
    out.insert(out.end(), appended.begin(), appended.begin() + written);
  }
}

void IndicesWithinError(const float* scores, int64_t n, int64_t k, float error,
                        std::vector<int64_t>& out, std::vector<uint64_t>& scratch) {
  const float last = KthLargest(scores, n, k, scratch);
  // The k best may all be lower by the error, and others higher. Numbers about as large as `last` are
  // rounded four times: both scores and what they stand for.
  const float rounding = 0x1p-21f * (std::abs(last) + 2 * error);
  IndicesAtLeast(scores, n, last - 2 * error - rounding, out);
}

std::vector<int64_t> BestIndices(const std::vector<float>& scores, int64_t k) {
  thread_local std::vector<uint64_t> scratch;
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<int64_t> best(static_cast<size_t>(std::min(n, k)));
  if (k >= n) {
    std::iota(best.begin(), best.end(), 0);
    return best;
  }
  if (k <= 0) return best;
  const absl::Span<uint64_t> packed = Best(scores.data(), n, k, scratch);
  for (size_t i = 0; i < best.size(); ++i) best[i] = IndexOf(packed[i]);
  std::sort(best.begin(), best.end());
  return best;
}

}  // namespace carrel::kernels
#endif
