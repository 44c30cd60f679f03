// Q is A of the tensor cores, rows are B: a warp takes 16 rows at a time, straight from memory, and the
// next 16 travel while it writes. As many blocks as are resident at once share the rows.
#include <algorithm>

#include "kernels/launch-inl.cuh"
#include "kernels/mma-inl.cuh"
#include "kernels/score/dot_score/dot_score_cuda.h"
#include "kernels/softmax_state-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kTile = 16;
constexpr int kStep = kWarps * kTile;
constexpr int kMinBlockRows = 8 * kStep;
constexpr int kBlocksPerSm = 3;
constexpr int kMaxGroup = 16;

// Of four scores, -inf those that are not there, in a lane.
__device__ __forceinline__ void AddScores(SoftmaxState& state, const float (&x)[4]) {
  const float max = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  if (max > state.max) {
    state.sum *= __expf(state.max - max);
    state.max = max;
  }
  if (state.max == -INFINITY) return;
  state.sum += (__expf(x[0] - state.max) + __expf(x[1] - state.max)) +
               (__expf(x[2] - state.max) + __expf(x[3] - state.max));
}

// The block's state of each q head of the group.
__device__ void StoreStates(const DotScoreCudaParams& p, const SoftmaxState* of_lane, int shares,
                            SoftmaxState (*of_warps)[kMaxGroup]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int group = static_cast<int>(p.group);
  for (int s = 0; s < shares; ++s) {
    SoftmaxState state = of_lane[s];
#pragma unroll
    for (int m = 1; m <= 2; m *= 2) {
      state = Join(state, {__shfl_xor_sync(~0u, state.max, m), __shfl_xor_sync(~0u, state.sum, m)});
    }
    if (t == 0 && g + 8 * s < group) of_warps[warp][g + 8 * s] = state;
  }
  __syncthreads();
  const int h = threadIdx.x;
  if (h >= group) return;
  SoftmaxState state = of_warps[0][h];
  for (int w = 1; w < kWarps; ++w) state = Join(state, of_warps[w][h]);
  const int64_t at = (static_cast<int64_t>(blockIdx.y) * group + h) * gridDim.x + blockIdx.x;
  p.states[2 * at] = state.max;
  p.states[2 * at + 1] = state.sum;
}

// Grid: (parts, kv_heads). share: rows of a part.
template <int kDim, bool kWide>
__global__ void __launch_bounds__(kWarps * 32, kWide ? 2 : kBlocksPerSm)
    DotScoreKernel(const DotScoreCudaParams p, int share) {
  constexpr int kLoads = kDim / 32, kShares = kWide ? 2 : 1;
  __shared__ SoftmaxState of_warps[kWarps][kMaxGroup];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = static_cast<int>(p.group);
  const int64_t head = blockIdx.y;
  const uint16_t* q = p.q + head * group * kDim + 8 * t;
  uint4 of_q[kShares][kLoads];
#pragma unroll
  for (int s = 0; s < kShares; ++s) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      of_q[s][j] =
          g + 8 * s < group ? LoadStream16(q + (g + 8 * s) * kDim + 32 * j) : uint4{0, 0, 0, 0};
    }
  }
  const uint16_t* k = p.kv.k + head * p.kv.row_stride * kDim + 8 * t;
  const int rows = static_cast<int>(p.rows);
  const int begin = min(rows, static_cast<int>(blockIdx.x) * share);
  const int end = min(rows, begin + share);
  uint4 x[2][kLoads];
  // Beyond the end the last row is read again.
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(tile + 8 * i + g, end - 1);
#pragma unroll
      for (int j = 0; j < kLoads; ++j)
        x[i][j] = LoadStream16(k + static_cast<int64_t>(row) * kDim + 32 * j);
    }
  };
  SoftmaxState state[kShares];
#pragma unroll
  for (int s = 0; s < kShares; ++s) state[s] = {-INFINITY, 0};
  const int first = begin + static_cast<int>(threadIdx.x) / 32 * kTile;
  if (first < end) load(first);
  for (int tile = first; tile < end; tile += kStep) {
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        MmaPair(c[i], of_q[0][j], kWide ? of_q[kShares - 1][j] : uint4{0, 0, 0, 0}, x[i][j]);
      }
    }
    if (tile + kStep < end) load(tile + kStep);
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
      if (g + 8 * s >= group) continue;
      float* at = p.scores + (head * group + g + 8 * s) * p.score_stride + tile + 2 * t;
      float of_rows[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const bool there = tile + 8 * i + 2 * t + odd < end;
          const float score = p.scale * c[i][2 * s + odd];
          if (there) at[8 * i + odd] = score;
          of_rows[2 * i + odd] = there ? score : -INFINITY;
        }
      }
      if (p.states != nullptr) AddScores(state[s], of_rows);
    }
  }
  if (p.states != nullptr) StoreStates(p, state, kShares, of_warps);
}

int64_t Share(int64_t rows, int64_t parts) {
  return ((rows + parts - 1) / parts + kStep - 1) / kStep * kStep;
}

}  // namespace

int64_t DotScoreParts(int64_t kv_heads, int64_t rows) {
  const int64_t resident =
      std::max<int64_t>(1, kBlocksPerSm * Multiprocessors() / std::max<int64_t>(1, kv_heads));
  return std::clamp<int64_t>((rows + kMinBlockRows - 1) / kMinBlockRows, 1,
                             std::min(resident, kMaxDotScoreParts));
}

cudaError_t DotScoreCuda(const DotScoreCudaParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > kMaxGroup || p.rows < 0 ||
      (p.head_dim != 64 && p.head_dim != 128) || p.rows > p.score_stride || p.rows >= 1 << 30 ||
      p.rows > p.kv.row_stride) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const bool wide = p.group > 8;
  const auto kernel = p.head_dim == 64
                          ? (wide ? DotScoreKernel<64, true> : DotScoreKernel<64, false>)
                          : (wide ? DotScoreKernel<128, true> : DotScoreKernel<128, false>);
  const int64_t parts = DotScoreParts(p.kv_heads, p.rows);
  return Launch({.grid = GridOf(parts, p.kv_heads), .threads = kWarps * 32}, stream, kernel, p,
                static_cast<int>(Share(p.rows, parts)));
}

}  // namespace carrel::kernels
