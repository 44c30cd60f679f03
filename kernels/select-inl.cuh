// Selection of the k largest of a row of keys that several blocks share: each block publishes the
// suffix sums of its histogram, a barrier, and every block finds by itself where the k-th largest
// falls and how many of the chosen lie in the blocks before it. Nothing is summed by atomics, so
// the result has one order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace carrel::kernels {

// Ascending keys are ascending scores; NaN as -inf, -0 as 0. No score has key 0.
__device__ __forceinline__ unsigned KeyOf(float score) {
  const float value = isnan(score) ? -INFINITY : score + 0.0f;
  const unsigned bits = __float_as_uint(value);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}

// Zero before its first use, and ready for the next at the end of each.
struct RowSync {
  unsigned arrived;
  unsigned finished;
};

// The two halves of a RowBarrier, between which a block may do what needs no other. What the first
// returns is for the second; thread 0 alone has use for it. Block 0 adds what the others lack to
// turn the highest bit of `arrived`, which is what the others wait for.
__device__ __forceinline__ unsigned ArriveAtRow(RowSync* sync, int block, int blocks) {
  __syncthreads();
  if (threadIdx.x != 0 || blocks == 1) return 0;
  __threadfence();
  return atomicAdd(&sync->arrived,
                   block == 0 ? 0x80000000u - static_cast<unsigned>(blocks - 1) : 1u);
}
__device__ __forceinline__ void WaitForRow(const RowSync* sync, unsigned arrived, int blocks) {
  if (threadIdx.x == 0 && blocks > 1) {
    unsigned now = arrived;
    while (((now ^ arrived) & 0x80000000u) == 0) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(now)
                   : "l"(&sync->arrived)
                   : "memory");
    }
    __threadfence();
  }
  __syncthreads();
}

// All threads of the `blocks` blocks of a row, which must be resident together.
__device__ __forceinline__ void RowBarrier(RowSync* sync, int block, int blocks) {
  WaitForRow(sync, ArriveAtRow(sync, block, blocks), blocks);
}

// Of values[warps], the sum of those before this warp's.
__device__ __forceinline__ unsigned SumBeforeWarp(const unsigned* values) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  return __reduce_add_sync(~0u, lane < warp ? values[lane] : 0);
}

// counts[t] becomes the sum of counts[t ..]; counts[bins] becomes 0. All threads of the block.
template <int kThreads>
__device__ void SuffixSums(unsigned* counts, int bins) {
  __shared__ unsigned warp_total[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = (bins + kThreads - 1) / kThreads;  // of a thread, the first from the top
  const int top = bins - 1 - static_cast<int>(threadIdx.x) * share;
  unsigned own = 0;
  for (int i = 0; i < share && top - i >= 0; ++i) own += counts[top - i];
  unsigned before = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) warp_total[warp] = before;
  before -= own;
  __syncthreads();
  before += SumBeforeWarp(warp_total);
  for (int i = 0; i < share && top - i >= 0; ++i) {
    before += counts[top - i];
    counts[top - i] = before;
  }
  if (threadIdx.x == 0) counts[bins] = 0;
  __syncthreads();
}

// Where the k-th largest falls.
struct Threshold {
  unsigned digit;         // its bin
  unsigned above;         // keys of the row in higher bins
  unsigned above_before;  // those in blocks before this one
  unsigned equal_before;  // keys of bin `digit` in blocks before this one
};

inline constexpr int kColumnLoads = 4;  // in flight at a time
inline constexpr int kMostColumns = 64;

// Of column(i), 0 <= i < 2^bits: total[i] over all blocks, earlier[i] over those before this one.
// All threads; synchronises.
template <int kThreads, class Read, class Column>
__device__ void SumColumns(Read read, Column column, int bits, int block, int blocks,
                           unsigned* total, unsigned* earlier) {
  const int count = 1 << bits, all = blocks << bits;
  for (int i = threadIdx.x; i < count; i += kThreads) total[i] = earlier[i] = 0;
  __syncthreads();
  for (int first = threadIdx.x; first < all; first += kColumnLoads * kThreads) {
    unsigned parts[kColumnLoads];
#pragma unroll
    for (int i = 0; i < kColumnLoads; ++i) {
      const int at = first + i * kThreads;
      parts[i] = at < all ? read(at >> bits, column(at & (count - 1))) : 0;
    }
#pragma unroll
    for (int i = 0; i < kColumnLoads; ++i) {
      const int at = first + i * kThreads;
      if (at >= all || parts[i] == 0) continue;
      atomicAdd(&total[at & (count - 1)], parts[i]);
      if (at >> bits < block) atomicAdd(&earlier[at & (count - 1)], parts[i]);
    }
  }
  __syncthreads();
}

// Where the k-th largest of a row falls. read(block, t): the suffix sum of bin t, 0 <= t < bins, of
// a block's histogram. First the stretch of bins is sought, then the bin, so that few sums are
// read. bins at most kMostColumns^2. All threads, with the same values but for block.
template <int kThreads, class Read>
__device__ Threshold SearchColumns(Read read, int bins, unsigned k, int block, int blocks) {
  __shared__ unsigned total[2][kMostColumns + 1], earlier[2][kMostColumns + 1];
  __shared__ int stretch;
  __shared__ Threshold found;
  const int fine = bins <= 1024 ? 5 : 6, stretches = (bins + (1 << fine) - 1) >> fine;
  int coarse = 0;
  while (1 << coarse < stretches) ++coarse;
  const auto there = [&](int b, int t) { return t < bins ? read(b, t) : 0; };
  SumColumns<kThreads>(
      there, [&](int i) { return i << fine; }, coarse, block, blocks, total[0], earlier[0]);
  for (int i = threadIdx.x; i < stretches; i += kThreads) {
    const unsigned next = i + 1 < stretches ? total[0][i + 1] : 0;
    if (total[0][i] >= k && next < k) {
      stretch = i;
      total[1][1 << fine] = next;
      earlier[1][1 << fine] = i + 1 < stretches ? earlier[0][i + 1] : 0;
    }
  }
  __syncthreads();
  const int first = stretch << fine;
  SumColumns<kThreads>(
      there, [&](int i) { return first + i; }, fine, block, blocks, total[1], earlier[1]);
  for (int i = threadIdx.x; i < 1 << fine; i += kThreads) {
    if (total[1][i] >= k && total[1][i + 1] < k) {
      found = {static_cast<unsigned>(first + i), total[1][i + 1], earlier[1][i + 1],
               earlier[1][i] - earlier[1][i + 1]};
    }
  }
  __syncthreads();
  const Threshold result = found;
  __syncthreads();  // what comes next may write shared memory at once
  return result;
}

// counts: shared, [bins + 1], this block's histogram, becomes its suffix sums. published: [blocks,
// bins + 1], of the row. 1 <= k <= keys counted; bins below the threshold may be counted
// incompletely. All threads of the row's blocks; passes one RowBarrier.
template <int kThreads>
__device__ Threshold FindThreshold(unsigned* counts, int bins, unsigned k, unsigned* published,
                                   RowSync* sync, int block, int blocks) {
  SuffixSums<kThreads>(counts, bins);
  for (int t = threadIdx.x; t < bins; t += kThreads) {
    __stcg(published + static_cast<int64_t>(block) * (bins + 1) + t, counts[t]);
  }
  RowBarrier(sync, block, blocks);
  return SearchColumns<kThreads>(
      [&](int b, int t) { return __ldcg(published + static_cast<int64_t>(b) * (bins + 1) + t); },
      bins, k, block, blocks);
}

// For the keys of [begin, end) that are above the threshold, or equal to it, in ascending order:
// take(above, rank among its kind in this block, index). load(j, keys) reads kItems keys from j on,
// a multiple of kItems from begin, and largest(j) gives the largest of them; what they say of
// places beyond end is ignored. All threads.
template <int kThreads, int kItems, class Load, class Largest, class Take>
__device__ void TakeSelected(int begin, int end, unsigned threshold, Load load, Largest largest,
                             Take take) {
  constexpr int kWarps = kThreads / 32, kStep = 32 * kItems;
  constexpr unsigned kAbove = 1u << 31;
  __shared__ unsigned warp_above[kWarps], warp_equal[kWarps];
  __shared__ unsigned chosen[kWarps][32];  // a warp's first, mostly all: index, and whether above
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned lanes_before = (1u << lane) - 1;
  const int share = ((end - begin + kWarps - 1) / kWarps + kStep - 1) / kStep * kStep;
  const int first = begin + warp * share, last = min(end, first + share);

  // visit(above, how many of its kind came before, of both kinds, index)
  unsigned above = 0, equal = 0;
  const auto scan = [&](auto visit) {
    for (int base = first; base < last; base += kStep) {
      const int j = base + lane * kItems;
      const bool some = j < last && largest(j) >= threshold;
      if (!__any_sync(~0u, some)) continue;
      unsigned above_here = 0, equal_here = 0;  // a bit per item
      if (some) {
        unsigned keys[kItems];
        load(j, keys);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const bool there = j + i < last;
          above_here |= static_cast<unsigned>(there && keys[i] > threshold) << i;
          equal_here |= static_cast<unsigned>(there && keys[i] == threshold) << i;
        }
      }
      const unsigned own = __popc(above_here) | __popc(equal_here) << 16;
      unsigned sums = own;  // at most 32 kItems each
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const unsigned other = __shfl_up_sync(~0u, sums, d);
        if (lane >= d) sums += other;
      }
      unsigned rank_above = above + ((sums - own) & 0xffff);
      unsigned rank_equal = equal + ((sums - own) >> 16);
      for (unsigned left = above_here | equal_here; left != 0; left &= left - 1) {
        const int i = __ffs(static_cast<int>(left)) - 1;
        const bool is_above = above_here >> i & 1;
        visit(is_above, is_above ? rank_above : rank_equal, rank_above + rank_equal, j + i);
        ++(is_above ? rank_above : rank_equal);
      }
      const unsigned all = __shfl_sync(~0u, sums, 31);
      above += all & 0xffff;
      equal += all >> 16;
    }
  };
  scan([&](bool is_above, unsigned, unsigned rank, int j) {
    if (rank < 32) chosen[warp][rank] = static_cast<unsigned>(j) | (is_above ? kAbove : 0);
  });
  if (lane == 0) {
    warp_above[warp] = above;
    warp_equal[warp] = equal;
  }
  __syncthreads();
  const unsigned count = above + equal;
  above = SumBeforeWarp(warp_above);
  equal = SumBeforeWarp(warp_equal);
  if (count > 32) {
    scan([&](bool is_above, unsigned rank, unsigned, int j) { take(is_above, rank, j); });
    return;
  }
  const bool mine = static_cast<unsigned>(lane) < count;
  const unsigned entry = mine ? chosen[warp][lane] : 0;
  const bool is_above = entry & kAbove;
  const unsigned all_above = __ballot_sync(~0u, is_above);
  const unsigned all_equal = __ballot_sync(~0u, mine && !is_above);
  if (mine) {
    take(is_above,
         is_above ? above + __popc(all_above & lanes_before)
                  : equal + __popc(all_equal & lanes_before),
         static_cast<int>(entry & ~kAbove));
  }
}

}  // namespace carrel::kernels
