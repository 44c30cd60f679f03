// Scores become integers of the same order, and the k-th best is found by halving between the least and
// the largest: counting is a comparison per vector, and a few hundred scores are all that is counted, since
// a bar that a sample suggests leaves most out. Who wants indices scans for what is above the k-th best.
#include "kernels/select/topk/topk.h"

#include <algorithm>
#include <bit>
#include <cmath>
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
// fewer places than four vectors have lanes; returns where it stopped.
int64_t ScanAboveImpl(const float* scores, int64_t begin, int64_t n, float bar, uint32_t* out,
                      int64_t places, int64_t* written) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec bars = hn::Set(d, bar);
  int64_t i = begin, count = 0;
  // Stored whole: compressing into memory takes AMD's processors hundreds of cycles.
  const hn::RebindToUnsigned<FloatTag> du;
  const auto append = [&](int64_t at, auto mask) HWY_ATTR {
    const auto index = hn::Iota(du, static_cast<uint32_t>(at));
    hn::StoreU(hn::Compress(index, hn::RebindMask(du, mask)), du, out + count);
    count += static_cast<int64_t>(hn::CountTrue(d, mask));
  };
  for (; i + 4 * lanes <= n && count + 4 * lanes <= places; i += 4 * lanes) {
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

using OrderTag = hn::RebindToSigned<FloatTag>;
using OrderVec = hn::Vec<OrderTag>;

// Integers ordered as their floats are; NaN counts as -inf and -0 as 0.
HWY_INLINE OrderVec OrderOf(FloatVec x) {
  const FloatTag d;
  const OrderTag di;
  const FloatVec value =
      hn::IfThenElse(hn::IsNaN(x), hn::Set(d, -INFINITY), hn::Add(x, hn::Zero(d)));
  const OrderVec bits = hn::BitCast(di, value);
  const OrderVec below_sign = hn::And(hn::ShiftRight<31>(bits), hn::Set(di, INT32_MAX));
  return hn::Xor(bits, below_sign);
}

// Of scores > bar, their order into out; returns how many, or -1 if there are more than places. out has
// room for a vector more.
int64_t OrdersAboveImpl(const float* scores, int64_t n, float bar, int32_t* out, int64_t places) {
  const FloatTag d;
  const OrderTag di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec bars = hn::Set(d, bar);
  int64_t count = 0, i = 0;
  for (; i + lanes <= n && count <= places; i += lanes) {
    const FloatVec x = hn::LoadU(d, scores + i);
    const auto above = hn::Gt(x, bars);
    if (hn::AllFalse(d, above)) continue;
    // Stored whole: compressing into memory takes AMD's processors hundreds of cycles.
    hn::StoreU(hn::Compress(OrderOf(x), hn::RebindMask(di, above)), di, out + count);
    count += static_cast<int64_t>(hn::CountTrue(d, above));
  }
  for (; i < n && count <= places; ++i) {
    if (!(scores[i] > bar)) continue;
    out[count++] = hn::GetLane(OrderOf(hn::Set(d, scores[i])));
  }
  return count <= places ? count : -1;
}

// Of all n. out has room for a vector more.
void OrdersOfImpl(const float* scores, int64_t n, int32_t* out) {
  const FloatTag d;
  const OrderTag di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(OrderOf(hn::LoadU(d, scores + i)), di, out + i);
  if (i < n) hn::StoreU(OrderOf(LoadPartial(d, scores + i, n - i)), di, out + i);
}

// What is counted: orders, or scores as they are.
struct Orders {
  const int32_t* at;
  HWY_INLINE OrderVec Load(int64_t i) const { return hn::LoadU(OrderTag(), at + i); }
  HWY_INLINE int32_t One(int64_t i) const { return at[i]; }
};
struct Scores {
  const float* at;
  HWY_INLINE OrderVec Load(int64_t i) const { return OrderOf(hn::LoadU(FloatTag(), at + i)); }
  HWY_INLINE int32_t One(int64_t i) const {
    return hn::GetLane(OrderOf(hn::Set(FloatTag(), at[i])));
  }
};

template <class Numbers>
HWY_INLINE int64_t CountAtLeast(Numbers numbers, int64_t n, int32_t bar) {
  const OrderTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const OrderVec bars = hn::Set(d, bar);
  OrderVec below = hn::Zero(d);  // of each lane, negative
  int64_t i = 0, count = 0;
  for (; i + lanes <= n; i += lanes) {
    below = hn::Add(below, hn::VecFromMask(d, hn::Lt(numbers.Load(i), bars)));
  }
  count = i + hn::GetLane(hn::SumOfLanes(d, below));
  for (; i < n; ++i) count += numbers.One(i) >= bar;
  return count;
}

// The least of those >= bar, of which there are some.
template <class Numbers>
HWY_INLINE int32_t LeastAtLeast(Numbers numbers, int64_t n, int32_t bar) {
  const OrderTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const OrderVec bars = hn::Set(d, bar), most = hn::Set(d, INT32_MAX);
  OrderVec least = most;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const OrderVec x = numbers.Load(i);
    least = hn::Min(least, hn::IfThenElse(hn::Lt(x, bars), most, x));
  }
  int32_t found = hn::GetLane(hn::MinOfLanes(d, least));
  for (; i < n; ++i) {
    if (numbers.One(i) >= bar) found = std::min(found, numbers.One(i));
  }
  return found;
}

// The k-th largest, 1 <= k <= n < 2^31.
template <class Numbers>
HWY_INLINE int32_t KthOf(Numbers numbers, int64_t n, int64_t k) {
  int32_t least = INT32_MAX, most = INT32_MIN;
  const OrderTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  if (n >= lanes) {
    OrderVec low = hn::Set(d, least), high = hn::Set(d, most);
    for (; i + lanes <= n; i += lanes) {
      const OrderVec x = numbers.Load(i);
      low = hn::Min(low, x);
      high = hn::Max(high, x);
    }
    least = hn::GetLane(hn::MinOfLanes(d, low));
    most = hn::GetLane(hn::MaxOfLanes(d, high));
  }
  for (; i < n; ++i) {
    least = std::min(least, numbers.One(i));
    most = std::max(most, numbers.One(i));
  }
  // At least k are >= low, and fewer are > high.
  for (int64_t low = least, high = most;;) {
    if (low == high) return static_cast<int32_t>(low);
    const int64_t middle = low + (high - low + 1) / 2;
    const int64_t count = CountAtLeast(numbers, n, static_cast<int32_t>(middle));
    if (count == k) return LeastAtLeast(numbers, n, static_cast<int32_t>(middle));
    if (count > k) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
}

int32_t KthOrderImpl(const int32_t* orders, int64_t n, int64_t k) {
  return KthOf(Orders{orders}, n, k);
}
int32_t KthOfScoresImpl(const float* scores, int64_t n, int64_t k) {
  return KthOf(Scores{scores}, n, k);
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(ScanAboveImpl);
HWY_EXPORT(OrdersAboveImpl);
HWY_EXPORT(OrdersOfImpl);
HWY_EXPORT(KthOrderImpl);
HWY_EXPORT(KthOfScoresImpl);

namespace {

// Scores looked at to choose a bar, about.
constexpr int64_t kSample = 512;
// Room for scores above the bar, by k, by n and at least: where they are more, all are counted instead.
constexpr int64_t kRoomPerWanted = 4;
constexpr int64_t kScoresPerRoom = 64;
constexpr int64_t kLeastRoom = 1024;
// So few are made orders before they are counted.
constexpr int64_t kFewScores = 4096;
// A vector of orders that is stored whole.
constexpr int64_t kVectorOrders = 64;

float ScoreOf(int32_t order) { return std::bit_cast<float>(order ^ ((order >> 31) & INT32_MAX)); }

// Ascending order of what it returns is (order descending, index ascending).
uint64_t Pack(int32_t order, uint32_t index) {
  return static_cast<uint64_t>(static_cast<uint32_t>(order ^ INT32_MAX)) << 32 | index;
}

uint32_t IndexOf(uint64_t packed) { return static_cast<uint32_t>(packed); }

// Those scores as orders, until the thread's next call.
const int32_t* OrdersOf(const float* scores, int64_t n) {
  thread_local std::vector<int32_t> orders;
  if (static_cast<int64_t>(orders.size()) < n + kVectorOrders) {
    orders.resize(static_cast<size_t>(n + kVectorOrders));
  }
  HWY_DYNAMIC_DISPATCH(OrdersOfImpl)(scores, n, orders.data());
  return orders.data();
}

// A score that likely k others and not many more exceed, by a sample; -inf where none is known.
float SampledBar(const float* scores, int64_t n, int64_t k) {
  thread_local std::vector<float> sample;
  const int64_t step = n / kSample;
  if (step < 2) return -INFINITY;
  sample.clear();
  for (int64_t i = step / 2; i < n; i += step) sample.push_back(scores[i]);
  const double expected = static_cast<double>(k) / static_cast<double>(step);
  const auto rank = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 4);
  const auto sampled = static_cast<int64_t>(sample.size());
  if (2 * rank > sampled) return -INFINITY;
  const int32_t* const orders = OrdersOf(sample.data(), sampled);
  return ScoreOf(HWY_DYNAMIC_DISPATCH(KthOrderImpl)(orders, sampled, rank + 1));
}

int64_t Room(int64_t n, int64_t k) { return kRoomPerWanted * k + n / kScoresPerRoom + kLeastRoom; }

// The k-th largest, 1 <= k <= n.
float KthScore(const float* scores, int64_t n, int64_t k) {
  thread_local std::vector<int32_t> orders;
  const float bar = SampledBar(scores, n, k);
  if (bar > -INFINITY) {
    const int64_t places = Room(n, k);
    if (static_cast<int64_t>(orders.size()) < places + 2 * kVectorOrders) {
      orders.resize(static_cast<size_t>(places + 2 * kVectorOrders));
    }
    const int64_t above =
        HWY_DYNAMIC_DISPATCH(OrdersAboveImpl)(scores, n, bar, orders.data(), places);
    if (above >= k) return ScoreOf(HWY_DYNAMIC_DISPATCH(KthOrderImpl)(orders.data(), above, k));
  }
  if (n <= kFewScores)
    return ScoreOf(HWY_DYNAMIC_DISPATCH(KthOrderImpl)(OrdersOf(scores, n), n, k));
  return ScoreOf(HWY_DYNAMIC_DISPATCH(KthOfScoresImpl)(scores, n, k));
}

// The best k of n orders, k <= n, packed, by index; index_of ascends.
template <class IndexOf>
void PackBest(const int32_t* orders, int64_t n, int64_t k, const IndexOf& index_of,
              uint64_t* best) {
  const int32_t last = HWY_DYNAMIC_DISPATCH(KthOrderImpl)(orders, n, k);
  int64_t equal = k;  // to the last: so many first ones
  for (int64_t i = 0; i < n; ++i) equal -= orders[i] > last ? 1 : 0;
  // Nobody foresees which they are: a place is written for each, and kept for k.
  uint64_t* const end = best + k;
  for (int64_t i = 0; best < end; ++i) {
    *best = Pack(orders[i], index_of(i));
    const int64_t is_last = orders[i] == last ? 1 : 0;
    const int64_t taken = is_last & (equal > 0 ? 1 : 0);
    equal -= taken;
    best += taken | (orders[i] > last ? 1 : 0);
  }
}

// The best k of n scores, 0 < k <= n, packed, by index. They stay in scratch.
absl::Span<uint64_t> Best(const float* scores, int64_t n, int64_t k,
                          std::vector<uint64_t>& scratch) {
  thread_local std::vector<uint32_t> indices;
  thread_local std::vector<float> above;
  if (static_cast<int64_t>(scratch.size()) < k) scratch.resize(static_cast<size_t>(k));
  const absl::Span<uint64_t> best(scratch.data(), static_cast<size_t>(k));
  const float bar = SampledBar(scores, n, k);
  if (bar > -INFINITY) {
    const int64_t places = Room(n, k);
    indices.resize(static_cast<size_t>(places));
    int64_t written = 0;
    const int64_t end =
        HWY_DYNAMIC_DISPATCH(ScanAboveImpl)(scores, 0, n, bar, indices.data(), places, &written);
    if (end == n && written >= k) {
      above.resize(static_cast<size_t>(written));
      for (int64_t i = 0; i < written; ++i) {
        above[static_cast<size_t>(i)] = scores[indices[static_cast<size_t>(i)]];
      }
      PackBest(
          OrdersOf(above.data(), written), written, k,
          [](int64_t i) { return indices[static_cast<size_t>(i)]; }, best.data());
      return best;
    }
  }
  PackBest(
      OrdersOf(scores, n), n, k, [](int64_t i) { return static_cast<uint32_t>(i); }, best.data());
  return best;
}

}  // namespace

int64_t TopK(const float* scores, int64_t n, int64_t k, int64_t* out,
             std::vector<uint64_t>& scratch) {
  k = std::min(k, n);
  if (k <= 0) return 0;
  const absl::Span<uint64_t> best = Best(scores, n, k, scratch);
  SortWords(best.data(), k);
  for (int64_t i = 0; i < k; ++i) out[i] = IndexOf(best[static_cast<size_t>(i)]);
  return k;
}

int64_t TopKAscending(const float* scores, int64_t n, int64_t k, int64_t* out,
                      std::vector<uint64_t>& scratch) {
  k = std::min(k, n);
  if (k <= 0) return 0;
  const absl::Span<uint64_t> best = Best(scores, n, k, scratch);
  for (int64_t i = 0; i < k; ++i) out[i] = IndexOf(best[static_cast<size_t>(i)]);
  return k;
}

float KthLargest(const float* scores, int64_t n, int64_t k) {
  return n == 0 ? INFINITY : KthScore(scores, n, std::min(k, n));
}

std::vector<int64_t> BestIndices(const std::vector<float>& scores, int64_t k) {
  thread_local std::vector<uint64_t> scratch;
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<int64_t> best(static_cast<size_t>(std::clamp<int64_t>(k, 0, n)));
  if (k >= n) {
    std::iota(best.begin(), best.end(), 0);
  } else {
    TopKAscending(scores.data(), n, k, best.data(), scratch);
  }
  return best;
}

}  // namespace carrel::kernels
#endif
