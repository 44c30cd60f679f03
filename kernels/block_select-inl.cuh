// The k largest of a list of keys by one block of threads, in ascending order of their index: what
// comes out of a round of pruning is again in the order of rows. The k-th largest is found in three
// digits, as in topk; then every thread counts in its share of the list what it takes.
#pragma once

#include "kernels/select-inl.cuh"

namespace carrel::kernels {

inline constexpr int kSelectBins = 2048;

// Shared memory.
template <int kThreads>
struct BlockSelectScratch {
  unsigned counts[kSelectBins + 1];
  uint64_t warp_total[kThreads / 32];
  unsigned digit, above;
};

// Of a value per thread, the sum of those of the threads before; `total` becomes the sum of all.
// The halves of a value are summed by themselves, each below 2^32. All threads; synchronises before
// it returns.
template <int kThreads>
__device__ uint64_t SumOfThreadsBefore(uint64_t own, uint64_t* warp_total, uint64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t sum = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warp_total[warp] = sum;
  __syncthreads();
  const uint64_t of_warp = lane < kThreads / 32 ? warp_total[lane] : 0;
  const auto sum_halves = [](uint64_t x) {
    const unsigned low = __reduce_add_sync(~0u, static_cast<unsigned>(x));
    return uint64_t{__reduce_add_sync(~0u, static_cast<unsigned>(x >> 32))} << 32 | low;
  };
  const uint64_t before = sum_halves(lane < warp ? of_warp : 0);
  total = sum_halves(of_warp);
  __syncthreads();
  return before + sum - own;
}

// Where the k-th largest of a list falls, or that there are no more than k.
struct BlockThreshold {
  unsigned key;    // the k-th largest; 0 if all are taken
  unsigned above;  // how many are larger
};

template <int kThreads, class Key>
__device__ BlockThreshold FindThresholdInBlock(int n, int k, Key key,
                                               BlockSelectScratch<kThreads>& scratch) {
  constexpr int kSteps = 3;
  constexpr int kShift[kSteps] = {21, 10, 0};
  constexpr unsigned kDigits[kSteps] = {2047, 2047, 1023};
  unsigned* counts = scratch.counts;
  unsigned prefix = 0, above = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    for (int t = threadIdx.x; t < kSelectBins; t += kThreads) counts[t] = 0;
    __syncthreads();
    const unsigned fixed = step == 0 ? 0 : ~0u << kShift[step == 0 ? 0 : step - 1];
    for (int j = threadIdx.x; j < n; j += kThreads) {
      const unsigned x = key(j);
      if (x != 0 && (x & fixed) == prefix) atomicAdd(&counts[x >> kShift[step] & kDigits[step]], 1);
    }
    __syncthreads();
    SuffixSums<kThreads>(counts, kSelectBins);
    if (step == 0 && counts[0] <= static_cast<unsigned>(k)) return {0, counts[0]};
    const unsigned wanted = static_cast<unsigned>(k) - above;
    for (int t = threadIdx.x; t < kSelectBins; t += kThreads) {
      if (counts[t] >= wanted && counts[t + 1] < wanted) {
        scratch.digit = static_cast<unsigned>(t);
        scratch.above = counts[t + 1];
      }
    }
    __syncthreads();
    prefix |= scratch.digit << kShift[step];
    above += scratch.above;
  }
  return {prefix, above};
}

// key(j) for 0 <= j < n: KeyOf of a score, or 0 for what is not there. Calls take(rank, j) for the
// first k when those that are there are ordered by (key descending, index ascending); ranks count
// from 0 in the order of j. Returns how many: k, or all if there are fewer. All threads, each with
// the same n and k; what take wrote is visible to all after the next __syncthreads.
template <int kThreads, class Key, class Take>
__device__ int SelectInBlock(int n, int k, Key key, BlockSelectScratch<kThreads>& scratch,
                             Take take) {
  const BlockThreshold t = FindThresholdInBlock<kThreads>(n, k, key, scratch);
  // If all are taken, every key that is there lies above 0, and none that equals it is taken.
  const unsigned prefix = t.key, above = t.above;
  const uint64_t equal_wanted = prefix == 0 ? 0 : static_cast<unsigned>(k) - above;
  const int share = (n + kThreads - 1) / kThreads;
  const int first = min(n, static_cast<int>(threadIdx.x) * share), last = min(n, first + share);
  uint64_t own = 0;  // above in the low half, equal in the high one
  for (int j = first; j < last; ++j) {
    const unsigned x = key(j);
    own += x > prefix ? uint64_t{1} : x == prefix ? uint64_t{1} << 32 : uint64_t{0};
  }
  uint64_t total = 0;
  const uint64_t before = SumOfThreadsBefore<kThreads>(own, scratch.warp_total, total);
  if (own != 0) {
    uint64_t above_before = before & 0xffffffffu, equal_before = before >> 32;
    for (int j = first; j < last; ++j) {
      const unsigned x = key(j);
      const uint64_t rank = above_before + min(equal_before, equal_wanted);
      if (x > prefix) {
        take(static_cast<int>(rank), j);
        ++above_before;
      } else if (x == prefix) {
        if (equal_before < equal_wanted) take(static_cast<int>(rank), j);
        ++equal_before;
      }
    }
  }
  return static_cast<int>(above + equal_wanted);
}

}  // namespace carrel::kernels
