// Selection of the k largest of a row of keys that several blocks share: each block publishes the
// suffix sums of its histogram, a barrier, and every block finds by itself where the k-th largest
// falls and how many of the chosen lie in the blocks before it. Nothing is summed by atomics, so
// the result has one order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace carrel::kernels {

// Zero before its first use, and ready for the next at the end of each.
struct RowSync {
  unsigned arrived;
  unsigned generation;
  unsigned finished;
};

// All threads of the `blocks` blocks of a row, which must be resident together.
__device__ __forceinline__ void RowBarrier(RowSync* sync, unsigned blocks) {
  __syncthreads();
  if (threadIdx.x == 0 && blocks > 1) {
    const auto generation = [&] {
      unsigned value;
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                   : "=r"(value)
                   : "l"(&sync->generation)
                   : "memory");
      return value;
    };
    const unsigned before = generation();
    __threadfence();
    if (atomicAdd(&sync->arrived, 1u) == blocks - 1) {
      atomicExch(&sync->arrived, 0u);
      __threadfence();
      atomicAdd(&sync->generation, 1u);
    } else {
      while (generation() == before) {
      }
    }
    __threadfence();
  }
  __syncthreads();
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
  for (int w = 0; w < warp; ++w) before += warp_total[w];
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

// counts: shared, [bins + 1], this block's histogram; used up. published: [blocks, bins + 1], of
// the row. 1 <= k <= keys counted. All threads of the row's blocks.
template <int kThreads>
__device__ Threshold FindThreshold(unsigned* counts, int bins, unsigned k, unsigned* published,
                                   RowSync* sync, int block, int blocks) {
  __shared__ Threshold found;
  SuffixSums<kThreads>(counts, bins);
  for (int t = threadIdx.x; t <= bins; t += kThreads) {
    __stcg(published + static_cast<int64_t>(block) * (bins + 1) + t, counts[t]);
  }
  RowBarrier(sync, static_cast<unsigned>(blocks));
  for (int t = threadIdx.x; t < bins; t += kThreads) {  // counts[bins] is 0 already
    unsigned total = 0;
#pragma unroll 16
    for (int b = 0; b < blocks; ++b) {
      total += __ldcg(published + static_cast<int64_t>(b) * (bins + 1) + t);
    }
    counts[t] = total;
  }
  __syncthreads();
  for (int t = threadIdx.x; t < bins; t += kThreads) {
    if (counts[t] >= k && counts[t + 1] < k) {
      found.digit = static_cast<unsigned>(t);
      found.above = counts[t + 1];
    }
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    unsigned above = 0, equal = 0;
    for (int b = threadIdx.x; b < block; b += 32) {
      const unsigned* at = published + static_cast<int64_t>(b) * (bins + 1) + found.digit;
      const unsigned higher = __ldcg(at + 1);
      above += higher;
      equal += __ldcg(at) - higher;
    }
    above = __reduce_add_sync(~0u, above);
    equal = __reduce_add_sync(~0u, equal);
    if (threadIdx.x == 0) {
      found.above_before = above;
      found.equal_before = equal;
    }
  }
  __syncthreads();
  const Threshold result = found;
  __syncthreads();  // `found` may be written again
  return result;
}

// For the keys of [begin, end) that are above the threshold, or equal to it, in ascending order:
// take(above, rank among its kind in this block, index, key). load(j, keys) reads kItems keys from
// j on, a multiple of kItems from begin, of which those beyond end are ignored. All threads.
template <int kThreads, int kItems, class Load, class Take>
__device__ void TakeSelected(int begin, int end, unsigned threshold, Load load, Take take) {
  constexpr int kWarps = kThreads / 32, kStep = 32 * kItems;
  __shared__ unsigned warp_above[kWarps], warp_equal[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int share = ((end - begin + kWarps - 1) / kWarps + kStep - 1) / kStep * kStep;
  const int first = begin + warp * share, last = min(end, first + share);
  unsigned above = 0, equal = 0;  // in this warp so far
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    for (int base = first; base < last; base += kStep) {
      const int j = base + lane * kItems;
      unsigned keys[kItems];
      int own_above = 0, own_equal = 0;
      if (j < last) {
        load(j, keys);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          own_above += j + i < last && keys[i] > threshold;
          own_equal += j + i < last && keys[i] == threshold;
        }
      }
      if (!__any_sync(~0u, own_above + own_equal)) continue;
      int scan = own_above | own_equal << 16;  // at most 32 kItems each
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, scan, d);
        if (lane >= d) scan += other;
      }
      if (pass == 1) {
        unsigned rank_above = above + (scan & 0xffff) - own_above;
        unsigned rank_equal = equal + (scan >> 16) - own_equal;
        for (int i = 0; i < kItems && own_above + own_equal > 0; ++i) {
          if (j + i >= last || keys[i] < threshold) continue;
          const bool is_above = keys[i] > threshold;
          take(is_above, is_above ? rank_above++ : rank_equal++, j + i, keys[i]);
        }
      }
      const int all = __shfl_sync(~0u, scan, 31);
      above += all & 0xffff;
      equal += all >> 16;
    }
    if (pass == 1) break;
    if (lane == 0) {
      warp_above[warp] = above;
      warp_equal[warp] = equal;
    }
    __syncthreads();
    above = equal = 0;
    for (int w = 0; w < warp; ++w) {
      above += warp_above[w];
      equal += warp_equal[w];
    }
  }
}

}  // namespace carrel::kernels
