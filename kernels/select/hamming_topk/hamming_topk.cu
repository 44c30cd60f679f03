#include <algorithm>
#include <type_traits>

#include "kernels/score_select-inl.cuh"
#include "kernels/select/hamming_topk/group_code-inl.cuh"
#include "kernels/select/hamming_topk/hamming_topk.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kLeastBlockRows = 4 * kThreads;

struct Counts {
  int bins;
  int copies, copy_stride;  // of the histogram; copies is a power of two
  __host__ __device__ size_t bytes() const {
    const size_t numbers = static_cast<size_t>(copies * copy_stride + bins + 1);
    return (numbers * sizeof(unsigned) + 15) / 16 * 16;
  }
};

struct Args {
  HammingTopKParams p;
  ScoreRows rows;
  Counts counts;
};

Counts CountsOf(const HammingTopKParams& p) {
  Counts c;
  c.bins = static_cast<int>(p.group * p.bits / (p.group % 2 == 0 ? 2 : 1) + 1);
  // Scores crowd around their mean: lanes that count into copies of their own collide less.
  c.copies = c.bins <= 520 ? 4 : 1;
  c.copy_stride = (c.bins + 31) / 32 * 32 + 8;  // copies begin a quarter of the banks apart
  return c;
}

ScorePlan PlanOf(const HammingTopKParams& p) {
  const Counts counts = CountsOf(p);
  return PlanScores({.rows = p.rows,
                     .kv_heads = p.kv_heads,
                     .least_block_rows = kLeastBlockRows,
                     .blocks_per_sm = kBlocksPerSm,
                     .count_bytes = counts.bytes(),
                     .static_bytes = 4608,
                     .published = static_cast<size_t>(counts.bins) + 1});
}

// All threads; synchronises before and after.
__device__ void SumCopies(const unsigned* counts, const Counts& of, unsigned* sums) {
  __syncthreads();
  for (int t = threadIdx.x; t < of.bins; t += kThreads) {
    unsigned sum = counts[t];
    for (int c = 1; c < of.copies; ++c) sum += counts[c * of.copy_stride + t];
    sums[t] = sum;
  }
  __syncthreads();
}

// Grid: (blocks, kv_heads).
template <int kWords, int kPlanes>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) HammingTopKKernel(const Args a) {
  extern __shared__ __align__(16) uint8_t dynamic[];  // counts, then scores if they are here
  __shared__ GroupCode<kWords, kPlanes> group;
  __shared__ int shared_bar;
  AllowNextLaunch();  // every block is resident: what begins early takes no place from them
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  uint16_t* scores = a.rows.OfBlock(dynamic + a.counts.bytes());
  auto* counts = reinterpret_cast<unsigned*>(dynamic);
  const int bins = a.counts.bins, counted = a.counts.copies * a.counts.copy_stride;
  unsigned* sums = counts + counted;  // the histogram's copies, then their sum
  for (int t = threadIdx.x; t < counted; t += kThreads) counts[t] = 0;
  if (threadIdx.x == 0) shared_bar = 0;

  const int begin = a.rows.begin(), end = a.rows.end();
  const uint32_t* codes = a.p.codes + head * a.p.code_stride * kWords;
  const int first = begin + static_cast<int>(threadIdx.x);
  CodeRound<kWords> round;
  round.Load(codes, first, end, kThreads);
  group.Make(a.p.queries + head * a.p.group * kWords, static_cast<int>(a.p.group));
  {
    const GroupCode<kWords, kPlanes> in_registers = group;
    unsigned* own_counts = counts + (threadIdx.x & (a.counts.copies - 1)) * a.counts.copy_stride;
    int bar = 0;
    const auto take = [&](int j, const uint32_t(&code)[kWords]) {
      const int score = in_registers.HalvedScore(code);
      scores[j - begin] = static_cast<uint16_t>(score);
      if (score >= bar) atomicAdd(&own_counts[score], 1u);
    };
    // The k-th score of a part is no more than that of the whole: once k keys have been counted,
    // what lies below the k-th of them need not be. Most keys do.
    const int checkpoint = begin + (end - begin) / 4 / kThreads * kThreads;
    if (checkpoint - begin < 2 * a.rows.k) {
      ForEachCode<kWords>(round, codes, first, end, kThreads, take);
    } else {
      ForEachCode<kWords>(round, codes, first, checkpoint, kThreads, take);
      const int next = checkpoint + static_cast<int>(threadIdx.x);
      round.Load(codes, next, end, kThreads);
      SumCopies(counts, a.counts, sums);
      SuffixSums<kThreads>(sums, bins);
      for (int t = threadIdx.x; t < bins; t += kThreads) {
        if (sums[t] >= static_cast<unsigned>(a.rows.k) &&
            sums[t + 1] < static_cast<unsigned>(a.rows.k)) {
          shared_bar = t;
        }
      }
      __syncthreads();
      bar = shared_bar;
      ForEachCode<kWords>(round, codes, next, end, kThreads, take);
    }
  }
  SumCopies(counts, a.counts, sums);

  const Threshold t =
      FindThreshold<kThreads>(sums, bins, static_cast<unsigned>(a.rows.k),
                              a.rows.published + static_cast<int64_t>(head) * blocks * (bins + 1),
                              a.rows.sync + head, block, blocks);
  TakeScores<kThreads>(scores, begin, end, t.digit, t.above_before, t.above + t.equal_before,
                       a.rows.k, a.p.ids + head * a.p.k);
}

}  // namespace

size_t HammingTopKWorkspaceBytes(const HammingTopKParams& params) {
  return params.rows == 0 ? 0 : PlanOf(params).bytes;
}

cudaError_t HammingTopK(const HammingTopKParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > kMaxHammingGroup ||
      (p.bits != 64 && p.bits != 128 && p.bits != 256) || p.rows < 0 || p.rows > p.code_stride ||
      p.rows >= 1 << 30 || p.k < 0) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0 || p.k == 0) return cudaSuccess;
  if (p.workspace == nullptr) return cudaErrorInvalidValue;
  const ScorePlan plan = PlanOf(p);
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(p.kv_heads));
  return WithGroupCode(p.bits, p.group, [&](auto words, auto planes) {
    return LaunchTogether(HammingTopKKernel<decltype(words)::value, decltype(planes)::value>, grid,
                          kThreads, plan.shared_bytes,
                          Args{p, {plan, p.workspace, p.rows, p.k}, CountsOf(p)}, stream);
  });
}

}  // namespace carrel::kernels
