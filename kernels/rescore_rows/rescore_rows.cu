// Q is A of the tensor cores, keys are B, as in dot_score. A KV head's blocks are a cluster: sums of
// exponentials, and then histograms, are read where the other blocks keep them in shared memory.
#include <algorithm>
#include <cstring>

#include "kernels/mma-inl.cuh"
#include "kernels/rescore_rows/rescore_rows.h"
#include "kernels/select-inl.cuh"
#include "kernels/softmax_state-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 16;  // candidates of a warp's step
constexpr int kMaxGroup = 16;
constexpr int kMaxBlocks = 8;    // of a cluster: what every device with clusters serves
constexpr int kBlockRows = 256;  // a block for fewer is not worth its barriers
constexpr int kDigitBits = 10, kBins = 1 << kDigitBits;
constexpr float kLeast = -64.0f;  // scores are log-probabilities: at most 0
constexpr int kItems = 4;         // keys that a lane looks at together
constexpr int kPad = 8;           // between the scores of two q heads: other banks

struct Args {
  RescoreRowsParams p;
  int share;  // candidates of a block, a multiple of kTile
  int count, wanted;
};

// In each block's shared memory, read by its cluster.
struct Exchange {
  SoftmaxState states[kMaxGroup];
  unsigned suffix[2][kBins + 1];  // of each digit: suffix sums of the block's histogram
};

__device__ __forceinline__ void ClusterBarrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();  // one block
#endif
}

// *local of the block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T ReadOfBlock(const T* local, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  static_assert(sizeof(T) == 4);
  unsigned at, bits;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(at)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(local))), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits) : "r"(at) : "memory");
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
#else
  return *local;
#endif
}

__device__ __forceinline__ void AddScore(SoftmaxState& state, float score) {
  if (score > state.max) {
    state.sum *= __expf(state.max - score);
    state.max = score;
  }
  state.sum += __expf(score - state.max);
}

// Exact scores of this block's candidates: into scores [group, share + kPad], and their softmax
// states per warp and q head.
template <int kDim, bool kWide>
__device__ void ScoreCandidates(const Args& a, int head, int begin, int end, float* scores,
                                SoftmaxState (*of_warps)[kMaxGroup]) {
  constexpr int kLoads = kDim / 32, kShare = kWide ? 2 : 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int group = static_cast<int>(a.p.group), stride = a.share + kPad;
  const uint16_t* q = a.p.q + static_cast<int64_t>(head) * group * kDim + 8 * t;
  uint4 of_q[kShare][kLoads];
#pragma unroll
  for (int s = 0; s < kShare; ++s) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      of_q[s][j] =
          g + 8 * s < group ? LoadStream16(q + (g + 8 * s) * kDim + 32 * j) : uint4{0, 0, 0, 0};
    }
  }
  const int32_t* candidates = a.p.candidates + head * a.p.candidate_stride;
  const uint16_t* k = a.p.k + head * a.p.row_stride * kDim + 8 * t;
  uint4 tile_keys[2][kLoads];
  // Rows of the tile that is loaded next: known before its keys are asked for. Beyond the end the last
  // row is read again.
  int rows[2];
  const auto find = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) rows[i] = __ldg(candidates + min(tile + 8 * i + g, end - 1));
  };
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint16_t* key = k + static_cast<int64_t>(rows[i]) * kDim;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) tile_keys[i][j] = LoadStream16(key + 32 * j);
    }
    if (tile + kWarps * kTile < end) find(tile + kWarps * kTile);
  };
  SoftmaxState state[kShare];
#pragma unroll
  for (int s = 0; s < kShare; ++s) state[s] = {-INFINITY, 0};
  const int first = begin + warp * kTile;
  if (first < end) {
    find(first);
    load(first);
  }
  for (int tile = first; tile < end; tile += kWarps * kTile) {
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        MmaPair(c[i], of_q[0][j], kWide ? of_q[kShare - 1][j] : uint4{0, 0, 0, 0}, tile_keys[i][j]);
      }
    }
    // The registers of the keys are free: the next tile's travel during the rest.
    if (tile + kWarps * kTile < end) load(tile + kWarps * kTile);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile + 8 * i + 2 * t;
#pragma unroll
      for (int s = 0; s < kShare; ++s) {
        if (g + 8 * s >= group) continue;
        float* at = scores + (g + 8 * s) * stride + row - begin;
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const float score = a.p.scale * c[i][2 * s + odd];
          if (row + odd >= end) continue;
          at[odd] = score;
          AddScore(state[s], score);
        }
      }
    }
  }
#pragma unroll
  for (int s = 0; s < kShare; ++s) {
#pragma unroll
    for (int m = 1; m <= 2; m *= 2) {
      state[s] = Join(
          state[s], {__shfl_xor_sync(~0u, state[s].max, m), __shfl_xor_sync(~0u, state[s].sum, m)});
    }
    if (t == 0 && g + 8 * s < group) of_warps[warp][g + 8 * s] = state[s];
  }
}

// Joins the warps' states, then the cluster's: base [group]. Synchronises.
__device__ void SumOverCluster(const SoftmaxState (*of_warps)[kMaxGroup], int group, int blocks,
                               Exchange& exchange, float* base) {
  const int h = threadIdx.x;
  __syncthreads();
  if (h < group) {
    SoftmaxState state = of_warps[0][h];
    for (int w = 1; w < kWarps; ++w) state = Join(state, of_warps[w][h]);
    exchange.states[h] = state;
  }
  ClusterBarrier();
  if (h < group) {
    SoftmaxState state{-INFINITY, 0};
    for (int b = 0; b < blocks; ++b) {
      state = Join(state, {ReadOfBlock(&exchange.states[h].max, static_cast<unsigned>(b)),
                           ReadOfBlock(&exchange.states[h].sum, static_cast<unsigned>(b))});
    }
    base[h] = state.max + logf(state.sum);
  }
  __syncthreads();
}

// The first q head's scores become keys in 0 .. kBins^2 - 1 that rise with the group's score.
__device__ void MakeKeys(const Args& a, int rows, const float* base, float* scores) {
  const int group = static_cast<int>(a.p.group), stride = a.share + kPad;
  for (int i = threadIdx.x; i < rows; i += kThreads) {
    float best = -INFINITY;
    for (int h = 0; h < group; ++h) best = fmaxf(best, scores[h * stride + i] - base[h]);
    const int key = __float2int_rd((best - kLeast) * (kBins * kBins / -kLeast));
    reinterpret_cast<unsigned*>(scores)[i] =
        static_cast<unsigned>(min(max(key, 0), kBins * kBins - 1));
  }
  __syncthreads();
}

// FindThreshold of select-inl.cuh, by a cluster. own: this block's suffix sums; totals, before:
// [kBins + 1]. Passes one ClusterBarrier.
__device__ Threshold FindClusterThreshold(unsigned* own, unsigned* totals, unsigned* before,
                                          unsigned k, int block, int blocks) {
  __shared__ Threshold found;
  SuffixSums<kThreads>(own, kBins);
  ClusterBarrier();
  for (int t = threadIdx.x; t < kBins; t += kThreads) {
    unsigned total = 0, earlier = 0;
#pragma unroll
    for (int b = 0; b < kMaxBlocks; ++b) {
      const unsigned part = b < blocks ? ReadOfBlock(own + t, static_cast<unsigned>(b)) : 0;
      total += part;
      if (b < block) earlier += part;
    }
    totals[t] = total;
    before[t] = earlier;
  }
  if (threadIdx.x == 0) totals[kBins] = before[kBins] = 0;
  __syncthreads();
  for (int t = threadIdx.x; t < kBins; t += kThreads) {
    if (totals[t] >= k && totals[t + 1] < k) {
      found = {static_cast<unsigned>(t), totals[t + 1], before[t + 1], before[t] - before[t + 1]};
    }
  }
  __syncthreads();
  return found;
}

// Grid: (blocks, kv_heads), clusters of `blocks`.
template <int kDim, bool kWide>
__global__ void __launch_bounds__(kThreads, 1) RescoreRowsKernel(const Args a) {
  extern __shared__ __align__(16) float scores[];  // [group, share + kPad], later keys
  __shared__ Exchange exchange;
  __shared__ SoftmaxState of_warps[kWarps][kMaxGroup];
  __shared__ float base[kMaxGroup];
  __shared__ unsigned totals[kBins + 1], before[kBins + 1];
  AllowNextLaunch();
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  const int begin = min(a.count, block * a.share), end = min(a.count, begin + a.share);
  for (int t = threadIdx.x; t < 2 * (kBins + 1); t += kThreads) {
    (&exchange.suffix[0][0])[t] = 0;
  }
  WaitForEarlierLaunch();
  ScoreCandidates<kDim, kWide>(a, head, begin, end, scores, of_warps);
  SumOverCluster(of_warps, static_cast<int>(a.p.group), blocks, exchange, base);
  if (a.p.base != nullptr && block == 0 && threadIdx.x < a.p.group) {
    a.p.base[head * a.p.group + threadIdx.x] = base[threadIdx.x];
  }
  const int rows = end - begin;
  MakeKeys(a, rows, base, scores);
  const auto* keys = reinterpret_cast<const unsigned*>(scores);

  unsigned prefix = 0, above = 0, above_before = 0, equal_before = 0;
  for (int digit = 0; digit < 2; ++digit) {
    unsigned* counts = exchange.suffix[digit];
    for (int i = threadIdx.x; i < rows; i += kThreads) {
      const unsigned key = keys[i];
      if (digit == 0) {
        atomicAdd(&counts[key >> kDigitBits], 1u);
      } else if (key >> kDigitBits == prefix) {
        atomicAdd(&counts[key & (kBins - 1)], 1u);
      }
    }
    __syncthreads();
    const Threshold t = FindClusterThreshold(
        counts, totals, before, static_cast<unsigned>(a.wanted) - above, block, blocks);
    prefix = prefix << kDigitBits | t.digit;
    above += t.above;
    above_before += t.above_before;
    equal_before = t.equal_before;
  }
  ClusterBarrier();  // nobody reads this block's shared memory any more
  const int32_t* candidates = a.p.candidates + head * a.p.candidate_stride + begin;
  int32_t* ids = a.p.ids + head * a.p.wanted;
  TakeSelected<kThreads, kItems>(
      0, rows, prefix,
      [&](int j, unsigned(&of_lane)[kItems]) {
        const uint4 x = *reinterpret_cast<const uint4*>(keys + j);
        of_lane[0] = x.x;
        of_lane[1] = x.y;
        of_lane[2] = x.z;
        of_lane[3] = x.w;
      },
      // Beyond the end lies padding, which is not to count.
      [&](int j) {
        unsigned largest = 0;
        for (int i = 0; i < kItems && j + i < rows; ++i) largest = max(largest, keys[j + i]);
        return largest;
      },
      [&](bool is_above, unsigned rank, int j) {
        const unsigned at = is_above ? above_before + rank : above + equal_before + rank;
        if (at < static_cast<unsigned>(a.wanted)) ids[at] = candidates[j];
      });
}

bool ClustersServed() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

// Of a block, beside what it has statically.
int64_t DynamicBytes() {
  constexpr int64_t kStatic =
      sizeof(Exchange) + sizeof(SoftmaxState) * kWarps * kMaxGroup + 8 * (kBins + 1) + 4096;
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return 0;
  }
  return std::max<int64_t>(0, bytes - kStatic);
}

int64_t MostShare(int64_t group) {
  return std::max<int64_t>(0, DynamicBytes() / (4 * group) - kPad) / kTile * kTile;
}

}  // namespace

int64_t MostRescoredRows(int64_t group) {
  return MostShare(group) * (ClustersServed() ? kMaxBlocks : 1);
}

cudaError_t RescoreRows(const RescoreRowsParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > kMaxGroup || p.count < 0 ||
      p.count > p.candidate_stride || p.wanted < 0 || (p.head_dim != 64 && p.head_dim != 128) ||
      !(p.scale > 0) || p.count > MostRescoredRows(p.group)) {
    return cudaErrorInvalidValue;
  }
  if (p.count == 0 || p.wanted == 0) return cudaSuccess;
  int64_t blocks = 1;
  while (ClustersServed() && blocks < kMaxBlocks &&
         (blocks * kBlockRows < p.count || blocks * MostShare(p.group) < p.count)) {
    blocks *= 2;
  }
  Args a;
  a.p = p;
  a.count = static_cast<int>(p.count);
  a.wanted = static_cast<int>(std::min(p.wanted, p.count));
  a.share = static_cast<int>(((p.count + blocks - 1) / blocks + kTile - 1) / kTile * kTile);
  const size_t shared = static_cast<size_t>(p.group * (a.share + kPad)) * sizeof(float);
  const auto kernel =
      p.head_dim == 64
          ? (p.group > 8 ? RescoreRowsKernel<64, true> : RescoreRowsKernel<64, false>)
          : (p.group > 8 ? RescoreRowsKernel<128, true> : RescoreRowsKernel<128, false>);
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
      error != cudaSuccess) {
    return error;
  }
  bool early = false;
  if (const cudaError_t error = EarlyLaunchServed(&early); error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.kv_heads));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = early ? 2 : 0;  // an architecture has both or neither
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace carrel::kernels
