// Levels, which bf16 holds exactly, are A of the tensor cores, 16 keys to a product; weights are B:
// of a head, the leading bf16 part in one column and the rest in the next, so that a lane has both
// parts of a score. A lane's 16 bytes of labels are its share of 32 or 64 keys. Scores of single
// heads are computed twice instead of written and read.
#include <algorithm>

#include "kernels/launch-inl.cuh"
#include "kernels/mma-inl.cuh"
#include "kernels/score/channel_score/channel_score.h"
#include "kernels/softmax_state-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 128;  // of a KV head

// Labels i and i + 4 of a word as two bf16: 0x4300 | n is 128 + n.
__device__ __forceinline__ uint32_t TwoLevels(uint32_t word, int i) {
  const uint32_t shifted = (word >> (4 * i) & 0x000f000fu) | 0x43004300u;
  uint32_t levels;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(levels)
      : "r"(shifted), "r"(0x3f803f80u), "r"(0xc300c300u));  // times 1, minus 128
  return levels;
}

__device__ __forceinline__ float FromBf16(uint16_t x) {
  return __uint_as_float(static_cast<uint32_t>(x) << 16);
}

// The weights of four q heads, 4 set ..: a lane at g, t holds its channels' part of column g, which
// is of head g / 2, the leading part if g is even.
template <int kLane>
struct HeadWeights {
  uint32_t column[kLane / 2];
  float base;  // what level 0 everywhere scores, of head t

  __device__ void Make(const ChannelScoreParams& p, int64_t head, int set) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, h = 4 * set + g / 2;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kLane / 2; ++i) {
      float weight[2] = {0, 0};
      if (h < p.group) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int64_t c = head * 4 * kLane + kLane * t + 2 * i + odd;
          const float x =
              p.scale * FromBf16(p.q[(head * p.group + h) * p.head_dim + p.channels[c]]);
          weight[odd] = x * p.step[c];
          sum += x * p.least[c];
        }
      }
      const uint32_t leading = PackBf16(weight[0], weight[1]);
      column[i] = g % 2 == 0 ? leading
                             : PackBf16(weight[0] - __uint_as_float(leading << 16),
                                        weight[1] - __uint_as_float(leading & 0xffff0000u));
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    base = __shfl_sync(~0u, sum, 8 * t);  // of g = 2t
  }
};

struct Args {
  ChannelScoreParams p;
  SoftmaxState* parts;  // [kv_heads * group, kMostBlocks]
  int blocks;           // that leave parts
};

// Four keys, of which a lane has the scores: first + 8 i + g.
struct FourScores {
  int64_t first;
  float score[4];
};

// Calls take(set, scores of q head 4 set + t), sets in order, for all keys of the block's share.
// All lanes of a warp together; keys beyond the rows are among them.
template <int kWidth, int kSets, class Take>
__device__ void ForEachKey(const ChannelScoreParams& p, Take take) {
  constexpr int kLane = kWidth / 4, kParts = kWidth == 16 ? 2 : 1;  // of 32 keys, in a load
  const int lane = threadIdx.x % 32;
  const int64_t head = blockIdx.y;
  HeadWeights<kLane> weights[kSets];
#pragma unroll
  for (int s = 0; s < kSets; ++s) weights[s].Make(p, head, s);
  const auto* labels =
      reinterpret_cast<const uint4*>(p.labels + head * p.label_stride / 8 * kWidth) + lane;
  const int64_t loads = (p.rows + 32 * kParts - 1) / (32 * kParts);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kThreads / 32;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  uint4 next = at < loads ? LoadStream16(labels + at * 32) : uint4{0, 0, 0, 0};
  for (; at < loads; at += warps) {
    const uint32_t words[4] = {next.x, next.y, next.z, next.w};
    if (at + warps < loads) next = LoadStream16(labels + (at + warps) * 32);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      // Of the keys 8 i + g of these 32, the levels of this lane's channels, two to a word.
      uint32_t levels[4][kLane / 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = kWidth == 16 ? words[2 * part + i / 2] : words[i];
#pragma unroll
        for (int c = 0; c < kLane / 2; ++c) {
          levels[i][c] = TwoLevels(word, kWidth == 16 ? i % 2 * 2 + c : c);
        }
      }
#pragma unroll
      for (int s = 0; s < kSets; ++s) {
        FourScores four;
        four.first = (at * kParts + part) * 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float c[4] = {};
#pragma unroll
          for (int i = 0; i < kLane / 2; i += 2) {
            Mma(c, levels[2 * half][i], levels[2 * half + 1][i], levels[2 * half][i + 1],
                levels[2 * half + 1][i + 1], weights[s].column[i], weights[s].column[i + 1]);
          }
          four.score[2 * half] = weights[s].base + (c[0] + c[1]);
          four.score[2 * half + 1] = weights[s].base + (c[2] + c[3]);
        }
        take(s, four);
      }
    }
  }
}

// Grid: (blocks, kv_heads).
template <int kWidth, int kSets>
__global__ void __launch_bounds__(kThreads) ChannelLseKernel(const Args a) {
  constexpr int kWarps = kThreads / 32;
  __shared__ SoftmaxState warps[kWarps][4 * kSets];
  const int lane = threadIdx.x % 32, g = lane / 4, warp = threadIdx.x / 32;
  SoftmaxState state[kSets];
#pragma unroll
  for (int s = 0; s < kSets; ++s) state[s] = {-INFINITY, 0};
  ForEachKey<kWidth, kSets>(a.p, [&](int s, FourScores four) {
    if (four.first + 32 > a.p.rows) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (four.first + 8 * i + g >= a.p.rows) four.score[i] = -INFINITY;
      }
    }
    SoftmaxState& x = state[s];
    const float max =
        fmaxf(fmaxf(four.score[0], four.score[1]), fmaxf(four.score[2], four.score[3]));
    if (max > x.max) {
      x.sum *= __expf(x.max - max);
      x.max = max;
    }
    if (max == -INFINITY) return;
    x.sum += (__expf(four.score[0] - x.max) + __expf(four.score[1] - x.max)) +
             (__expf(four.score[2] - x.max) + __expf(four.score[3] - x.max));
  });
#pragma unroll
  for (int s = 0; s < kSets; ++s) {
    SoftmaxState x = state[s];
#pragma unroll
    for (int m = 4; m < 32; m *= 2) {
      x = Join(x, {__shfl_xor_sync(~0u, x.max, m), __shfl_xor_sync(~0u, x.sum, m)});
    }
    if (lane < 4) warps[warp][4 * s + lane] = x;
  }
  __syncthreads();
  const int h = static_cast<int>(threadIdx.x);
  if (h >= a.p.group) return;
  SoftmaxState x = warps[0][h];
  for (int w = 1; w < kWarps; ++w) x = Join(x, warps[w][h]);
  a.parts[(blockIdx.y * a.p.group + h) * kMostBlocks + blockIdx.x] = x;
}

// Grid: (blocks, kv_heads).
template <int kWidth, int kSets>
__global__ void __launch_bounds__(kThreads) ChannelScoreKernel(const Args a) {
  __shared__ float shared_base[4 * kSets];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t head = blockIdx.y;
  for (int h = threadIdx.x / 32; h < 4 * kSets; h += kThreads / 32) {
    SoftmaxState x{-INFINITY, 0};
    if (h < a.p.group) {
      const SoftmaxState* parts = a.parts + (head * a.p.group + h) * kMostBlocks;
      for (int i = lane; i < a.blocks; i += 32) x = Join(x, parts[i]);
    }
    x = JoinWarp(x);
    // A head that is not there never has the largest score.
    if (lane == 0) shared_base[h] = h < a.p.group ? x.max + logf(x.sum) : INFINITY;
  }
  __syncthreads();
  float base[kSets];
#pragma unroll
  for (int s = 0; s < kSets; ++s) base[s] = shared_base[4 * s + t];
  float* scores = a.p.scores + head * a.p.score_stride;
  float best[4];
  ForEachKey<kWidth, kSets>(a.p, [&](int s, const FourScores& four) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float score = four.score[i] - base[s];
      best[i] = s == 0 ? score : fmaxf(best[i], score);
    }
    if (s != kSets - 1) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      best[i] = fmaxf(best[i], __shfl_xor_sync(~0u, best[i], 1));
      best[i] = fmaxf(best[i], __shfl_xor_sync(~0u, best[i], 2));
    }
    // The lanes of a quad have the same four; each writes one.
    const int64_t key = four.first + 8 * t + g;
    const float own = t < 2 ? (t == 0 ? best[0] : best[1]) : (t == 2 ? best[2] : best[3]);
    if (key < a.p.rows) scores[key] = own;
  });
}

template <int kWidth, int kSets>
cudaError_t LaunchBoth(const LaunchShape& shape, cudaStream_t stream, const Args& a) {
  RETURN_IF_FAILED(Launch(shape, stream, ChannelLseKernel<kWidth, kSets>, a));
  return Launch(shape, stream, ChannelScoreKernel<kWidth, kSets>, a);
}

template <int kWidth>
cudaError_t LaunchSets(const LaunchShape& shape, cudaStream_t stream, const Args& a) {
  return a.p.group <= 4   ? LaunchBoth<kWidth, 1>(shape, stream, a)
         : a.p.group <= 8 ? LaunchBoth<kWidth, 2>(shape, stream, a)
                          : LaunchBoth<kWidth, 4>(shape, stream, a);
}

}  // namespace

size_t ChannelScoreWorkspaceBytes(int64_t kv_heads, int64_t group) {
  return static_cast<size_t>(kv_heads * group * kMostBlocks) * sizeof(SoftmaxState);
}

cudaError_t ChannelScore(const ChannelScoreParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > 16 || p.head_dim < 1 ||
      (p.width != 16 && p.width != 32) || p.rows < 0 || p.rows > p.label_stride ||
      p.label_stride % 64 != 0 || p.rows > p.score_stride) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  if (p.workspace == nullptr) return cudaErrorInvalidValue;
  constexpr int64_t kBlockKeys = 8 * 64;  // a warp's first load, at least
  const int64_t blocks =
      std::clamp<int64_t>((p.rows + kBlockKeys - 1) / kBlockKeys, 1, kMostBlocks);
  const Args a{p, static_cast<SoftmaxState*>(p.workspace), static_cast<int>(blocks)};
  const LaunchShape shape = {.grid = GridOf(blocks, p.kv_heads), .threads = kThreads};
  return p.width == 16 ? LaunchSets<16>(shape, stream, a) : LaunchSets<32>(shape, stream, a);
}

}  // namespace carrel::kernels
