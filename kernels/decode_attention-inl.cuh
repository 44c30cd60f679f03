// Attention of one token: each warp walks over tiles of 16 rows with a softmax of its own, the
// warps of a block are joined in shared memory, the blocks of a KV head in the workspace by
// whichever finishes last. Scores are Q (A, 16 heads) by K (B, 8 rows). They come out as the
// operand B of V (A, 16 elements) by weights (B, 8 heads), so that weights never change lanes.
#pragma once

#include <algorithm>

#include "kernels/decode_attention.h"
#include "kernels/kv_view.h"
#include "kernels/launch-inl.cuh"
#include "kernels/mma-inl.cuh"
#include "kernels/together-inl.cuh"

namespace carrel::kernels {

inline constexpr int kDecodeWarps = 4;
inline constexpr int kDecodeTile = 16;  // rows of a warp's step

struct DecodeArgs {
  const Bf16* q;
  KvView kv;
  const int32_t* ids;        // null: rows 0, 1, ...
  const int32_t* row_count;  // null: `rows`
  int64_t ids_stride, row_count_stride;
  int rows;
  int group;
  int splits;
  float scale;
  float* out;
  float* lse;
  // Workspace.
  unsigned* finished;  // [kv_heads]
  float2* part_state;  // [kv_heads, splits, group]: maximum of the products, sum of the weights
  float* part_out;     // [kv_heads, splits, group, head_dim]: weighted sums
};

inline size_t DecodeCounterBytes(int64_t kv_heads) {
  return (static_cast<size_t>(kv_heads) * sizeof(unsigned) + 255) / 256 * 256;
}

// exp(scale * x) = exp2(x * this)
__device__ __forceinline__ float Log2Scale(float scale) { return scale * 1.44269504f; }

// A softmax's running maximum and sum for one q head. The sum is this lane's share.
struct RunningSoftmax {
  float max = -INFINITY, sum = 0;
};

// A warp's sums of V's rows under a softmax of its own, in tiles of 16 rows.
template <int kDim, bool kWide>
class ValueWarp {
 public:
  static constexpr int kRowHalves = kDim / 64;
  static constexpr int kHeads = kWide ? 16 : 8;
  static constexpr int kShare = kWide ? 2 : 1;  // q heads that a lane looks after: g, and g + 8

  // v: of the KV head.
  __device__ explicit ValueWarp(const uint16_t* v)
      : v_(v), lane_(threadIdx.x % 32), g_(lane_ / 4), t_(lane_ % 4) {
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) out_[s][i][c] = 0;
      }
    }
  }

  // Rows 2t, 2t + 1, 8 + 2t and 9 + 2t of a tile, none of which may lack: what is not there could
  // be NaN.
  __device__ void LoadV(const int (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint16_t* row = v_ + static_cast<int64_t>(rows[i]) * kDim + 8 * g_;
#pragma unroll
      for (int half = 0; half < kRowHalves; ++half) {
        v_tile_[i][half] = LoadStream16(row + 64 * half);
      }
    }
  }

  // The rows loaded last. score[i][2 s + odd]: of q head g + 8 s and row 8 i + 2 t + odd of the
  // tile; of rows from `valid` on it does not matter.
  __device__ void Add(float (&score)[2][4], int valid, float log2_scale) {
    if (valid < kDecodeTile) Mask(score, valid);
    uint32_t weight[kShare][2];
#pragma unroll
    for (int s = 0; s < kShare; ++s) Weigh(score, s, log2_scale, weight[s]);
    Accumulate(weight);
  }

  // Whole sums of the weights in every lane of the quad.
  __device__ void SumWeights() {
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
      state_[s].sum += __shfl_xor_sync(~0u, state_[s].sum, 1);
      state_[s].sum += __shfl_xor_sync(~0u, state_[s].sum, 2);
    }
  }

  // max, sum [group]; out [group, kDim].
  __device__ void Store(int group, float* max, float* sum, float* out) const {
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
      const int h = g_ + 8 * s;
      if (t_ == 0 && h < group) {
        max[h] = state_[s].max;
        sum[h] = state_[s].sum;
      }
#pragma unroll
      for (int half = 0; half < kRowHalves; ++half) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          if (2 * t_ + odd + 8 * s >= group) continue;
          auto* at =
              reinterpret_cast<float2*>(out + (2 * t_ + odd + 8 * s) * kDim + 64 * half + 8 * g_);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float(&x)[4] = out_[s][4 * half + i];
            at[i] = {x[odd], x[2 + odd]};
          }
        }
      }
    }
  }

 private:
  __device__ void Mask(float (&score)[2][4], int valid) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (8 * i + 2 * t_ + c % 2 >= valid) score[i][c] = -INFINITY;
      }
    }
  }

  // Scores of q head g + 8s become weights, and what was summed before is scaled to the new
  // maximum.
  __device__ void Weigh(const float (&score)[2][4], int s, float log2_scale,
                        uint32_t (&weight)[2]) {
    RunningSoftmax& state = state_[s];
    const float x[4] = {score[0][2 * s], score[0][2 * s + 1], score[1][2 * s], score[1][2 * s + 1]};
    float max = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
    max = fmaxf(max, state.max);
    const float origin = max == -INFINITY ? 0.0f : max;
    if (__any_sync(~0u, max != state.max)) {
      const float shrink = exp2f((state.max - origin) * log2_scale);
      state.sum *= shrink;
      // The sums in this lane are of heads 2t and 2t + 1.
      const float even = __shfl_sync(~0u, shrink, 8 * t_);
      const float odd = __shfl_sync(~0u, shrink, 8 * t_ + 4);
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        out_[s][i][0] *= even;
        out_[s][i][1] *= odd;
        out_[s][i][2] *= even;
        out_[s][i][3] *= odd;
      }
      state.max = max;
    }
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = exp2f((x[i] - origin) * log2_scale);
    state.sum += (p[0] + p[1]) + (p[2] + p[3]);
    weight[0] = PackBf16(p[0], p[1]);
    weight[1] = PackBf16(p[2], p[3]);
  }

  // Rows n and n + 8 of product 4 half + i are elements 64 half + 8 n + 2i and + 2i + 1 of V's
  // rows.
  __device__ void Accumulate(const uint32_t (&weight)[kShare][2]) {
#pragma unroll
    for (int half = 0; half < kRowHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a = Word(v_tile_[0][half], i), b = Word(v_tile_[1][half], i);
        const uint32_t c = Word(v_tile_[2][half], i), d = Word(v_tile_[3][half], i);
#pragma unroll
        for (int s = 0; s < kShare; ++s) {
          Mma(out_[s][4 * half + i], LowHalves(a, b), HighHalves(a, b), LowHalves(c, d),
              HighHalves(c, d), weight[s][0], weight[s][1]);
        }
      }
    }
  }

  __device__ static uint32_t Word(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
  }

  const uint16_t* v_;
  const int lane_, g_, t_;
  uint4 v_tile_[4][kRowHalves];
  RunningSoftmax state_[kShare];
  float out_[kShare][kDim / 16][4];
};

template <int kDim, bool kWide, bool kIndexed>
class DecodeWarp : public ValueWarp<kDim, kWide> {
  using Values = ValueWarp<kDim, kWide>;

 public:
  static constexpr int kRowLoads = kDim / 32;  // of a lane, for one row of K
  static constexpr int kShare = Values::kShare;

  __device__ DecodeWarp(const DecodeArgs& a, int head)
      : Values(a.kv.v + head * a.kv.row_stride * kDim),
        scale_(Log2Scale(a.scale)),
        k_(a.kv.k + head * a.kv.row_stride * kDim),
        ids_(kIndexed ? a.ids + head * a.ids_stride : nullptr),
        g_(threadIdx.x % 32 / 4),
        t_(threadIdx.x % 4) {
    const uint16_t* q = a.q + static_cast<int64_t>(head) * a.group * kDim + 8 * t_;
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
      const int h = g_ + 8 * s;
#pragma unroll
      for (int j = 0; j < kRowLoads; ++j) {
        q_[s][j] = h < a.group ? LoadStream16(q + h * kDim + 32 * j) : uint4{0, 0, 0, 0};
      }
    }
  }

  // Tiles first, first + step, ... below end, all of them rows that exist.
  __device__ void Walk(int first, int end, int step) {
    if (first >= end) return;
    Find(first, end);
    LoadK();
    this->LoadV(v_row_next_);
    for (int tile = first; tile < end; tile += step) {
      float score[2][4] = {};
#pragma unroll
      for (int j = 0; j < kRowLoads; ++j) {
        const uint4 none{0, 0, 0, 0};
        MmaPair(score[0], q_[0][j], kWide ? q_[kShare - 1][j] : none, k_tile_[0][j]);
        MmaPair(score[1], q_[0][j], kWide ? q_[kShare - 1][j] : none, k_tile_[1][j]);
      }
      // The registers of K are free: the next tile's loads start now, and travel during the rest.
      const bool more = tile + step < end;
      if (more) {
        Find(tile + step, end);
        LoadK();
      }
      this->Add(score, end - tile, scale_);
      if (more) this->LoadV(v_row_next_);
    }
  }

 private:
  // The rows of a tile: of K this lane reads rows g and 8 + g, of V 2t, 2t + 1, 8 + 2t and 9 + 2t.
  // Beyond the end the last row is read again, lest what is not there be NaN.
  __device__ void Find(int tile, int end) {
    const int last = end - 1;
    if constexpr (kIndexed) {
      const int a = __ldg(ids_ + min(tile + g_, last)), b = __ldg(ids_ + min(tile + 8 + g_, last));
      k_row_[0] = a;
      k_row_[1] = b;
      v_row_next_[0] = __shfl_sync(~0u, a, 8 * t_);
      v_row_next_[1] = __shfl_sync(~0u, a, 8 * t_ + 4);
      v_row_next_[2] = __shfl_sync(~0u, b, 8 * t_);
      v_row_next_[3] = __shfl_sync(~0u, b, 8 * t_ + 4);
    } else {
      k_row_[0] = min(tile + g_, last);
      k_row_[1] = min(tile + 8 + g_, last);
      v_row_next_[0] = min(tile + 2 * t_, last);
      v_row_next_[1] = min(tile + 2 * t_ + 1, last);
      v_row_next_[2] = min(tile + 8 + 2 * t_, last);
      v_row_next_[3] = min(tile + 9 + 2 * t_, last);
    }
  }

  __device__ void LoadK() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint16_t* row = k_ + static_cast<int64_t>(k_row_[i]) * kDim + 8 * t_;
#pragma unroll
      for (int j = 0; j < kRowLoads; ++j) k_tile_[i][j] = LoadStream16(row + 32 * j);
    }
  }

  const float scale_;
  const uint16_t* k_;
  const int32_t* ids_;
  const int g_, t_;
  uint4 q_[kShare][kRowLoads];
  uint4 k_tile_[2][kRowLoads];
  int k_row_[2], v_row_next_[4];
};

// What a block's warps stored becomes the block's: take(i, sum, max, total) for the i-th four
// elements of [group, kDim]: sums over exp(scale * max), and the weights' total. All threads;
// synchronises before.
template <int kDim, int kWarps, int kHeads, class Take>
__device__ void JoinWarps(const float (*warp_max)[kHeads], const float (*warp_sum)[kHeads],
                          const float* sums, int group, float log2_scale, Take take) {
  __syncthreads();
  for (int i = threadIdx.x; i < group * kDim / 4; i += kWarps * 32) {
    const int h = i / (kDim / 4);
    float max = warp_max[0][h];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) max = fmaxf(max, warp_max[w][h]);
    const float origin = max == -INFINITY ? 0.0f : max;
    float total = 0;
    float4 sum{0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2f((warp_max[w][h] - origin) * log2_scale);
      const float4 x = reinterpret_cast<const float4*>(sums + w * kHeads * kDim)[i];
      total += weight * warp_sum[w][h];
      sum.x += weight * x.x;
      sum.y += weight * x.y;
      sum.z += weight * x.z;
      sum.w += weight * x.w;
    }
    take(i, sum, max, total);
  }
}

// The parts of one KV head become its output. weight: shared memory, [group, parts].
template <int kDim>
__device__ void JoinParts(const DecodeArgs& a, int head, int parts, float* weight) {
  const float log2_scale = Log2Scale(a.scale);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(head) * a.splits * a.group;
  for (int h = warp; h < a.group; h += kDecodeWarps) {
    float max = -INFINITY, sum = 0;
    float2 state[kMaxDecodeSplits / 32];
#pragma unroll
    for (int i = 0; i < kMaxDecodeSplits / 32; ++i) {
      const int s = lane + 32 * i;
      state[i] = s < parts ? __ldcg(&a.part_state[first + s * a.group + h]) : float2{-INFINITY, 0};
      max = fmaxf(max, state[i].x);
    }
#pragma unroll
    for (int m = 16; m > 0; m /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, m));
    const float origin = max == -INFINITY ? 0.0f : max;
#pragma unroll
    for (int i = 0; i < kMaxDecodeSplits / 32; ++i) {
      state[i].x = exp2f((state[i].x - origin) * log2_scale);  // from here on, its weight
      sum += state[i].x * state[i].y;
    }
#pragma unroll
    for (int m = 16; m > 0; m /= 2) sum += __shfl_xor_sync(~0u, sum, m);
    const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxDecodeSplits / 32; ++i) {
      if (lane + 32 * i < parts) weight[h * parts + lane + 32 * i] = state[i].x * inverse;
    }
    if (lane == 0) {
      a.lse[head * a.group + h] = sum > 0 ? max * a.scale + logf(sum) : -INFINITY;
    }
  }
  __syncthreads();
  const auto* part = reinterpret_cast<const float4*>(a.part_out + first * kDim);
  auto* out = reinterpret_cast<float4*>(a.out + static_cast<int64_t>(head) * a.group * kDim);
  for (int i = threadIdx.x; i < a.group * kDim / 4; i += kDecodeWarps * 32) {
    const float* w = weight + i / (kDim / 4) * parts;
    float4 sum{0, 0, 0, 0};
#pragma unroll 16
    for (int s = 0; s < parts; ++s) {
      const float4 x = __ldcg(part + static_cast<int64_t>(s) * a.group * kDim / 4 + i);
      sum.x += w[s] * x.x;
      sum.y += w[s] * x.y;
      sum.z += w[s] * x.z;
      sum.w += w[s] * x.w;
    }
    out[i] = sum;
  }
}

// Grid: (most splits, kv_heads, sequences).
template <int kDim, bool kWide, bool kIndexed>
__global__ void __launch_bounds__(kDecodeWarps * 32, kDim == 128 ? (kWide ? 2 : 3) : 4)
    DecodeAttentionKernel(const __grid_constant__ Together<DecodeArgs> all) {
  const DecodeArgs& a = all.own();
  using Warp = DecodeWarp<kDim, kWide, kIndexed>;
  constexpr int kHeads = Warp::kHeads;
  // First the warps' results; then the weights of up to kMaxDecodeSplits parts.
  constexpr int kFloats = kDecodeWarps * kHeads * kDim;
  static_assert(kFloats >= kHeads * kMaxDecodeSplits);
  __shared__ __align__(16) float shared[kFloats];
  __shared__ float warp_max[kDecodeWarps][kHeads], warp_sum[kDecodeWarps][kHeads];
  __shared__ bool last;

  WaitForEarlierLaunch();
  const int head = blockIdx.y, split = blockIdx.x, splits = a.splits;
  const int rows = a.row_count == nullptr ? a.rows : a.row_count[head * a.row_count_stride];
  const int part_rows =
      ((rows + splits - 1) / splits + kDecodeTile - 1) / kDecodeTile * kDecodeTile;
  const int parts = rows == 0 ? 1 : (rows + part_rows - 1) / part_rows;
  if (split >= parts) return;

  const int warp = threadIdx.x / 32;
  const int begin = split * part_rows, end = min(rows, begin + part_rows);
  {
    Warp walk(a, head);
    walk.Walk(begin + warp * kDecodeTile, end, kDecodeWarps * kDecodeTile);
    walk.SumWeights();
    walk.Store(a.group, warp_max[warp], warp_sum[warp], shared + warp * kHeads * kDim);
  }
  const int64_t part = static_cast<int64_t>(head) * splits + split;
  JoinWarps<kDim, kDecodeWarps, kHeads>(
      warp_max, warp_sum, shared, a.group, Log2Scale(a.scale),
      [&](int i, const float4& sum, float max, float total) {
        __stcg(reinterpret_cast<float4*>(a.part_out + part * a.group * kDim) + i, sum);
        if (i % (kDim / 4) != 0) return;
        __stcg(&a.part_state[part * a.group + i / (kDim / 4)], float2{max, total});
      });

  // Whoever sees that all other parts are written joins them.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&a.finished[head], 1u) == static_cast<unsigned>(parts - 1);
  __syncthreads();
  if (!last) return;
  __threadfence();
  JoinParts<kDim>(a, head, parts, shared);
  if (threadIdx.x == 0) a.finished[head] = 0;  // for the next call
}

// What all sequences of a launch have in common.
struct DecodeHeads {
  int64_t kv_heads, group, head_dim;
  bool operator==(const DecodeHeads&) const = default;
};
template <class Params>
DecodeHeads DecodeHeadsOf(const Params& p) {
  return {p.kv_heads, p.group, p.head_dim};
}

template <class Params>
bool DecodeServed(const Params& p) {
  return p.kv_heads >= 1 && p.kv_heads <= 65535 && p.group >= 1 && p.group <= kMaxDecodeGroup &&
         p.splits >= 1 && p.splits <= kMaxDecodeSplits && p.rows >= 0 &&
         (p.head_dim == 64 || p.head_dim == 128) && p.scale > 0 && p.workspace != nullptr;
}

// Of a kernel's params, without ids.
template <class Params>
DecodeArgs DecodeArgsOf(const Params& p) {
  DecodeArgs a = {};
  a.q = p.q;
  a.kv = p.kv;
  a.row_count = p.row_count;
  a.rows = static_cast<int>(p.rows);
  a.group = static_cast<int>(p.group);
  a.splits = static_cast<int>(p.splits);
  a.scale = p.scale;
  a.out = p.out;
  a.lse = p.lse;
  auto* bytes = static_cast<uint8_t*>(p.workspace);
  a.finished = reinterpret_cast<unsigned*>(bytes);
  bytes += DecodeCounterBytes(p.kv_heads);
  a.part_out = reinterpret_cast<float*>(bytes);
  a.part_state =
      reinterpret_cast<float2*>(a.part_out + p.kv_heads * p.splits * p.group * p.head_dim);
  return a;
}

template <bool kIndexed>
auto DecodeKernelFor(const DecodeHeads& heads) {
  const bool wide = heads.group > 8;
  return heads.head_dim == 64 ? (wide ? DecodeAttentionKernel<64, true, kIndexed>
                                      : DecodeAttentionKernel<64, false, kIndexed>)
                              : (wide ? DecodeAttentionKernel<128, true, kIndexed>
                                      : DecodeAttentionKernel<128, false, kIndexed>);
}

// Of sequences alike in heads.
template <bool kIndexed, class Params, class Make>
cudaError_t LaunchDecodeAttention(std::span<const Params> some, Make args, cudaStream_t stream) {
  int64_t splits = 1;
  for (const Params& p : some) splits = std::max(splits, p.splits);
  return Launch({.grid = GridOf(splits, some[0].kv_heads, static_cast<int64_t>(some.size())),
                 .threads = kDecodeWarps * 32,
                 .early = true},
                stream, DecodeKernelFor<kIndexed>(DecodeHeadsOf(some[0])), TogetherOf(some, args));
}

// served(p), args(p): of each. Nothing is enqueued if one is not served.
template <bool kIndexed, class Params, class Served, class Make>
cudaError_t DecodeAttention(std::span<const Params> all, Served served, Make args,
                            cudaStream_t stream) {
  if (!std::all_of(all.begin(), all.end(), served)) return cudaErrorInvalidValue;
  return ForStretches(
      all, [](const Params& a, const Params& b) { return DecodeHeadsOf(a) == DecodeHeadsOf(b); },
      [&](std::span<const Params> some) {
        return LaunchDecodeAttention<kIndexed>(some, args, stream);
      });
}

}  // namespace carrel::kernels
