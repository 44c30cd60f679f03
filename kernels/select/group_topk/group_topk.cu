// Each block turns its rows' scores into 16-bit keys, which stay in shared memory; a barrier per
// digit joins the histograms of a KV head's blocks.
#include <algorithm>

#include "kernels/mma-inl.cuh"
#include "kernels/score_select-inl.cuh"
#include "kernels/select/group_topk/group_topk.h"
#include "kernels/softmax_state-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxGroup = 16;
constexpr int kLeastBlockRows = 4 * kThreads;
constexpr int kLowBits = 5, kLowBins = 1 << kLowBits, kBins = 2048;  // of keys of 16 bits
constexpr float kLeast = -64.0f, kSteps = 1024.0f;                   // per unit of score
constexpr int kPublished = kBins + 1 + kLowBins + 1;                 // of a block
constexpr size_t kCountBytes = ((kBins + 1) * sizeof(unsigned) + 15) / 16 * 16;

struct Args {
  GroupTopKParams p;
  ScoreRows rows;  // their scores are keys
};

// One block per SM, so that all are resident.
ScorePlan PlanOf(const GroupTopKParams& p) {
  return PlanScores({.rows = p.n,
                     .kv_heads = p.kv_heads,
                     .least_block_rows = kLeastBlockRows,
                     .blocks_per_sm = 1,
                     .count_bytes = kCountBytes,
                     .static_bytes = 8192,
                     .published = kPublished});
}

// base [group]. Synchronises.
__device__ void JoinStates(const GroupTopKParams& p, int head, float* base) {
  const int lane = threadIdx.x % 32, group = static_cast<int>(p.group);
  const int parts = static_cast<int>(p.parts);
  for (int h = threadIdx.x / 32; h < group; h += kThreads / 32) {
    const auto* states = reinterpret_cast<const float2*>(p.states) +
                         (static_cast<int64_t>(head) * group + h) * parts;
    SoftmaxState state{-INFINITY, 0};
    for (int i = lane; i < parts; i += 32) {
      const float2 part = states[i];
      state = Join(state, {part.x, part.y});
    }
    state = JoinWarp(state);
    if (lane != 0) continue;
    base[h] = state.max + logf(state.sum);
    if (p.base != nullptr && blockIdx.x == 0)
      p.base[static_cast<int64_t>(head) * group + h] = base[h];
  }
  __syncthreads();
}

__device__ __forceinline__ unsigned KeyOfGroupScore(float score) {
  return static_cast<unsigned>(min(max(__float2int_rd((score - kLeast) * kSteps), 0), 65535));
}

// Four scores from j on; what is not there is -inf.
__device__ __forceinline__ float4 LoadScores(const float* scores, int j, int n) {
  if (j + 4 <= n) return __ldcs(reinterpret_cast<const float4*>(scores + j));
  return {scores[j], j + 1 < n ? scores[j + 1] : -INFINITY, j + 2 < n ? scores[j + 2] : -INFINITY,
          -INFINITY};
}

// Keys of the rows [begin, end), and how many there are of each higher digit.
__device__ void MakeKeys(const Args& a, int head, const float* base, int begin, int end,
                         uint16_t* keys, unsigned* counts) {
  const int group = static_cast<int>(a.p.group);
  const float* scores = a.p.scores + static_cast<int64_t>(head) * group * a.p.score_stride;
#pragma unroll 2
  for (int j = begin + 4 * static_cast<int>(threadIdx.x); j < end; j += 4 * kThreads) {
    float4 best{-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll 4
    for (int h = 0; h < group; ++h) {
      const float4 x = LoadScores(scores + h * a.p.score_stride, j, end);
      const float less = base[h];
      best = {fmaxf(best.x, x.x - less), fmaxf(best.y, x.y - less), fmaxf(best.z, x.z - less),
              fmaxf(best.w, x.w - less)};
    }
    const unsigned of_rows[4] = {KeyOfGroupScore(best.x), KeyOfGroupScore(best.y),
                                 KeyOfGroupScore(best.z), KeyOfGroupScore(best.w)};
    *reinterpret_cast<uint2*>(keys + (j - begin)) = {of_rows[0] | of_rows[1] << 16,
                                                     of_rows[2] | of_rows[3] << 16};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (j + i < end) atomicAdd(&counts[of_rows[i] >> kLowBits], 1u);
    }
  }
}

// Grid: (blocks, kv_heads).
__global__ void __launch_bounds__(kThreads, 1) GroupTopKKernel(const Args a) {
  extern __shared__ __align__(16) uint8_t dynamic[];  // counts, then keys if they are here
  __shared__ float base[kMaxGroup];
  auto* counts = reinterpret_cast<unsigned*>(dynamic);
  AllowNextLaunch();  // every block is resident: what begins early takes no place from them
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  RowSync* sync = a.rows.sync + head;
  uint16_t* keys = a.rows.OfBlock(dynamic + kCountBytes);
  for (int t = threadIdx.x; t < kBins; t += kThreads) counts[t] = 0;
  JoinStates(a.p, head, base);
  const int begin = a.rows.begin(), end = a.rows.end();
  const int k = a.p.k_of_head == nullptr ? a.rows.k : min(a.p.k_of_head[head], a.rows.k);
  MakeKeys(a, head, base, begin, end, keys, counts);
  __syncthreads();

  unsigned* published = a.rows.published + static_cast<int64_t>(head) * blocks * kPublished;
  const Threshold high = FindThreshold<kThreads>(counts, kBins, static_cast<unsigned>(k), published,
                                                 sync, block, blocks);
  for (int t = threadIdx.x; t < kLowBins; t += kThreads) counts[t] = 0;
  __syncthreads();
  for (int j = threadIdx.x; j < end - begin; j += kThreads) {
    const unsigned key = keys[j];
    if (key >> kLowBits == high.digit) atomicAdd(&counts[key % kLowBins], 1u);
  }
  __syncthreads();
  const Threshold low = FindThreshold<kThreads>(
      counts, kLowBins, static_cast<unsigned>(k) - high.above,
      published + static_cast<int64_t>(blocks) * (kBins + 1), sync, block, blocks);
  const unsigned threshold = high.digit << kLowBits | low.digit;
  const unsigned above_before = high.above_before + low.above_before;
  const unsigned equal_first = high.above + low.above + low.equal_before;
  TakeScores<kThreads>(keys, begin, end, threshold, above_before, equal_first, k,
                       a.p.ids + head * a.p.k);
}

}  // namespace

size_t GroupTopKWorkspaceBytes(const GroupTopKParams& params) {
  return params.n == 0 ? 0 : PlanOf(params).bytes;
}

cudaError_t GroupTopK(const GroupTopKParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > kMaxGroup || p.n < 0 ||
      p.n >= 1 << 30 || p.n > p.score_stride || p.score_stride % 4 != 0 || p.k < 0 || p.parts < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.n == 0 || p.k == 0) return cudaSuccess;
  if (p.workspace == nullptr) return cudaErrorInvalidValue;
  const ScorePlan plan = PlanOf(p);
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(p.kv_heads));
  return LaunchTogether(GroupTopKKernel, grid, kThreads, plan.shared_bytes,
                        Args{p, {plan, p.workspace, p.n, p.k}}, stream);
}

}  // namespace carrel::kernels
