// The first launch leaves maximum and sum of exponentials of each part of a head's scores; every
// block of the second joins those of its group and goes over its rows.
#include <algorithm>

#include "kernels/group_score/group_score_cuda.h"
#include "kernels/softmax_state-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxParts = 128;
constexpr int kMinPartScores = 16 * kThreads;
constexpr int kMaxGroup = 16;

__device__ SoftmaxState Add(SoftmaxState state, float4 x) {
  const float max = fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
  if (max > state.max) {
    state.sum *= __expf(state.max - max);
    state.max = max;
  }
  state.sum += (__expf(x.x - state.max) + __expf(x.y - state.max)) +
               (__expf(x.z - state.max) + __expf(x.w - state.max));
  return state;
}

// Four scores from j on; those beyond n are -inf.
__device__ float4 Load(const float* scores, int64_t j, int64_t n) {
  if (j + 4 <= n) return *reinterpret_cast<const float4*>(scores + j);
  return {scores[j], j + 1 < n ? scores[j + 1] : -INFINITY, j + 2 < n ? scores[j + 2] : -INFINITY,
          -INFINITY};
}

// Grid: (parts, q heads).
__global__ void __launch_bounds__(kThreads) LseKernel(const GroupScoreCudaParams p) {
  __shared__ SoftmaxState warps[kThreads / 32];
  const int64_t head = blockIdx.y, parts = gridDim.x;
  const int64_t share = (p.n + parts - 1) / parts / 4 * 4 + 4;
  const int64_t first = blockIdx.x * share, last = min(p.n, first + share);
  const float* scores = p.scores + head * p.score_stride;
  SoftmaxState state{-INFINITY, 0};
  for (int64_t j = first + 4 * static_cast<int64_t>(threadIdx.x); j < last; j += 4 * kThreads) {
    state = Add(state, Load(scores, j, p.n));
  }
  state = JoinWarp(state);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = state;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  state = JoinWarp(threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : SoftmaxState{-INFINITY, 0});
  if (threadIdx.x == 0) {
    static_cast<SoftmaxState*>(p.workspace)[head * kMaxParts + blockIdx.x] = state;
  }
}

// Grid: (blocks, kv_heads).
__global__ void __launch_bounds__(kThreads)
    GroupScoreKernel(const GroupScoreCudaParams p, int parts) {
  __shared__ float base[kMaxGroup];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = static_cast<int>(p.group);
  const int64_t head = blockIdx.y;
  for (int h = warp; h < group; h += kThreads / 32) {
    const SoftmaxState* of_parts =
        static_cast<const SoftmaxState*>(p.workspace) + (head * group + h) * kMaxParts;
    SoftmaxState state{-INFINITY, 0};
    for (int i = lane; i < parts; i += 32) state = Join(state, of_parts[i]);
    state = JoinWarp(state);
    if (lane != 0) continue;
    base[h] = state.max + logf(state.sum);
    if (p.base != nullptr && blockIdx.x == 0) p.base[head * group + h] = base[h];
  }
  __syncthreads();
  const float* scores = p.scores + head * group * p.score_stride;
  float* out = p.out + head * p.out_stride;
  for (int64_t j = 4 * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x); j < p.n;
       j += 4 * static_cast<int64_t>(gridDim.x) * kThreads) {
    float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    for (int h = 0; h < group; ++h) {
      const float4 x = Load(scores + h * p.score_stride, j, p.n);
      best[0] = fmaxf(best[0], x.x - base[h]);
      best[1] = fmaxf(best[1], x.y - base[h]);
      best[2] = fmaxf(best[2], x.z - base[h]);
      best[3] = fmaxf(best[3], x.w - base[h]);
    }
    for (int i = 0; i < 4; ++i) {
      if (j + i < p.n) out[j + i] = best[i];
    }
  }
}

}  // namespace

size_t GroupScoreWorkspaceBytes(int64_t kv_heads, int64_t group) {
  return static_cast<size_t>(kv_heads * group * kMaxParts) * sizeof(SoftmaxState);
}

cudaError_t GroupScoreCuda(const GroupScoreCudaParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.group < 1 || p.group > kMaxGroup || p.kv_heads * p.group > 65535 ||
      p.n < 0 || p.n > p.score_stride || p.n > p.out_stride || p.score_stride % 4 != 0 ||
      p.out_stride % 4 != 0) {
    return cudaErrorInvalidValue;
  }
  if (p.n == 0) return cudaSuccess;
  if (p.workspace == nullptr) return cudaErrorInvalidValue;
  const int64_t parts =
      std::clamp<int64_t>((p.n + kMinPartScores - 1) / kMinPartScores, 1, kMaxParts);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(parts), static_cast<unsigned>(p.kv_heads * p.group));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  if (const cudaError_t error = cudaLaunchKernelEx(&config, LseKernel, p); error != cudaSuccess) {
    return error;
  }
  config.gridDim = dim3(
      static_cast<unsigned>(std::clamp<int64_t>((p.n + 4 * kThreads - 1) / (4 * kThreads), 1, 256)),
      static_cast<unsigned>(p.kv_heads));
  return cudaLaunchKernelEx(&config, GroupScoreKernel, p, static_cast<int>(parts));
}

}  // namespace carrel::kernels
