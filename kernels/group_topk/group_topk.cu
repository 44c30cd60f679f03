// Each block turns its rows' scores into 16-bit keys, which stay in shared memory; a barrier per digit
// joins the histograms of a KV head's blocks.
#include <algorithm>

#include "kernels/group_topk/group_topk.h"
#include "kernels/mma-inl.cuh"
#include "kernels/select-inl.cuh"
#include "kernels/softmax_state-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kMaxGroup = 16;
constexpr int kItems = 8;  // keys that a lane looks at together: 16 bytes
constexpr int kMinBlockRows = 4 * kThreads;
constexpr int kLowBits = 5, kLowBins = 1 << kLowBits, kBins = 2048;  // of keys of 16 bits
constexpr float kLeast = -64.0f, kSteps = 1024.0f;                   // per unit of score
constexpr int kPublished = kBins + 1 + kLowBins + 1;                 // of a block
constexpr size_t kCountBytes = (2 * (kBins + 1) * sizeof(unsigned) + 15) / 16 * 16;

struct Plan {
  int64_t blocks = 1;  // of a KV head
  int64_t share = 0;   // rows of a block, a multiple of kItems
  bool in_shared = true;
  size_t shared_bytes = 0;
  size_t published = 0, keys = 0, bytes = 0;  // offsets in the workspace, and its size
};

struct Args {
  GroupTopKParams p;
  RowSync* sync;        // [kv_heads]
  unsigned* published;  // [kv_heads, blocks, kPublished]
  uint16_t* keys;       // [kv_heads, blocks, share], or null: in shared memory
  int share, k;
};

size_t RoundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The same for the same shape on the same device. One block per SM, so that all are resident.
Plan PlanOf(const GroupTopKParams& p) {
  int device = 0, sms = 1, shared = 0;
  if (cudaGetDevice(&device) == cudaSuccess) {
    static_cast<void>(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    static_cast<void>(
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  }
  Plan plan;
  plan.blocks = std::clamp<int64_t>((p.n + kMinBlockRows - 1) / kMinBlockRows, 1,
                                    std::max<int64_t>(1, sms / p.kv_heads));
  plan.share = ((p.n + plan.blocks - 1) / plan.blocks + kItems - 1) / kItems * kItems;
  constexpr size_t kReserved = 8192;  // a block's static arrays
  const size_t keys = (static_cast<size_t>(plan.share) * sizeof(uint16_t) + 15) / 16 * 16;
  plan.in_shared = keys + kCountBytes + kReserved <= static_cast<size_t>(shared);
  plan.shared_bytes = (plan.in_shared ? keys : 0) + kCountBytes;
  plan.published = RoundUp(static_cast<size_t>(p.kv_heads) * sizeof(RowSync));
  const auto blocks = static_cast<size_t>(p.kv_heads * plan.blocks);
  plan.keys = plan.published + RoundUp(blocks * kPublished * sizeof(unsigned));
  plan.bytes = plan.keys +
               (plan.in_shared ? 0 : blocks * static_cast<size_t>(plan.share) * sizeof(uint16_t));
  return plan;
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
  extern __shared__ __align__(16) uint8_t dynamic[];  // counts, before, then keys if they are here
  __shared__ float base[kMaxGroup];
  auto* counts = reinterpret_cast<unsigned*>(dynamic);
  unsigned* before = counts + kBins + 1;
  AllowNextLaunch();  // every block is resident: what begins early takes no place from them
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  RowSync* sync = a.sync + head;
  const unsigned generation = Generation(sync);
  const int64_t of_block = static_cast<int64_t>(head) * blocks + block;
  uint16_t* keys = a.keys == nullptr ? reinterpret_cast<uint16_t*>(dynamic + kCountBytes)
                                     : a.keys + of_block * a.share;
  for (int t = threadIdx.x; t < kBins; t += kThreads) counts[t] = 0;
  JoinStates(a.p, head, base);
  const int n = static_cast<int>(a.p.n);
  const int begin = min(n, block * a.share), end = min(n, begin + a.share);
  MakeKeys(a, head, base, begin, end, keys, counts);
  __syncthreads();

  unsigned* published = a.published + static_cast<int64_t>(head) * blocks * kPublished;
  const Threshold high = FindThreshold<kThreads>(counts, before, kBins, static_cast<unsigned>(a.k),
                                                 published, sync, generation, block, blocks);
  for (int t = threadIdx.x; t < kLowBins; t += kThreads) counts[t] = 0;
  __syncthreads();
  for (int j = threadIdx.x; j < end - begin; j += kThreads) {
    const unsigned key = keys[j];
    if (key >> kLowBits == high.digit) atomicAdd(&counts[key % kLowBins], 1u);
  }
  __syncthreads();
  const Threshold low = FindThreshold<kThreads>(
      counts, before, kLowBins, static_cast<unsigned>(a.k) - high.above,
      published + static_cast<int64_t>(blocks) * (kBins + 1), sync, generation + 1, block, blocks);
  const unsigned threshold = high.digit << kLowBits | low.digit;
  const unsigned above_before = high.above_before + low.above_before;
  const unsigned equal_first = high.above + low.above + low.equal_before;
  int32_t* ids = a.p.ids + head * a.p.k;
  const auto load = [&](int j) { return *reinterpret_cast<const uint4*>(keys + (j - begin)); };
  TakeSelected<kThreads, kItems>(
      begin, end, threshold,
      [&](int j, unsigned(&of_lane)[kItems]) {
        const uint4 x = load(j);
        const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_lane[2 * i] = words[i] & 0xffff;
          of_lane[2 * i + 1] = words[i] >> 16;
        }
      },
      [&](int j) {
        const uint4 x = load(j);
        const unsigned pair = __vmaxu2(__vmaxu2(x.x, x.y), __vmaxu2(x.z, x.w));
        return max(pair & 0xffff, pair >> 16);
      },
      [&](bool above, unsigned rank, int j) {
        const unsigned at = above ? above_before + rank : equal_first + rank;
        if (at < static_cast<unsigned>(a.k)) ids[at] = j;
      });
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
  const Plan plan = PlanOf(p);
  auto* bytes = static_cast<uint8_t*>(p.workspace);
  Args a;
  a.p = p;
  a.sync = reinterpret_cast<RowSync*>(bytes);
  a.published = reinterpret_cast<unsigned*>(bytes + plan.published);
  a.keys = plan.in_shared ? nullptr : reinterpret_cast<uint16_t*>(bytes + plan.keys);
  a.share = static_cast<int>(plan.share);
  a.k = static_cast<int>(std::min(p.k, p.n));
  if (const cudaError_t error =
          cudaFuncSetAttribute(GroupTopKKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(plan.shared_bytes));
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(p.kv_heads));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = plan.blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, GroupTopKKernel, a);
}

}  // namespace carrel::kernels
