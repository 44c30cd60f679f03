// What summary_attention knows of the selected rows: what they take from their clusters, and what
// their V takes away; and what it shares for that: the workspace, the group's queries, loads of a
// row by a warp.
#pragma once

#include "common/cuda/runtime.h"
#include "kernels/attention/summary_attention/summary_attention_cuda.h"
#include "kernels/select-inl.cuh"

namespace carrel::kernels::summary {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kBlocksPerSm = 2;
inline constexpr int kTile = 16;  // clusters of a warp's step
inline constexpr int kMaxGroup = 16;
inline constexpr int kMaxSplits = 128;
inline constexpr int kSplitClusters = 32;     // a block for fewer is not worth its partial sums
inline constexpr float kFixed = 16777216.0f;  // 2^24: units of sums over selected rows
inline constexpr int kHalf = 128;  // of a query's two int8 parts, the higher counts so much more

struct Workspace {
  RowSync* sync;       // [kv_heads]
  unsigned* least;     // [kv_heads]: 0, or the complement of the ordered bits of t
  int* gone;           // [kv_heads, clusters]
  long long* sum;      // [q_heads, clusters]
  long long* squares;  // [q_heads, clusters]
  float* scores;       // [kv_heads, splits, kMaxGroup, share]: where they do not fit shared memory
  float* part_out;     // [q_heads, splits, head_dim]
  float2* part_state;  // [q_heads, splits]: maximum, sum of exponentials
};

struct Args {
  SummaryAttentionCudaParams p;
  Workspace w;
  int share;  // clusters of a block, a multiple of kTile
  bool in_shared;
};

// Bits that compare as the floats do, and back.
__device__ __forceinline__ unsigned Ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float FromOrdered(unsigned x) {
  return __uint_as_float(x >> 31 ? x & 0x7fffffffu : ~x);
}

__device__ __forceinline__ float WarpSum(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x += __shfl_xor_sync(~0u, x, m);
  return x;
}
__device__ __forceinline__ float WarpMax(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, m));
  return x;
}

// A lane's share of a row: kDim / 32 consecutive elements.
template <int kDim>
__device__ __forceinline__ void LoadBf16(const uint16_t* row, float (&x)[kDim / 32]) {
  const int lane = threadIdx.x % 32;
  if constexpr (kDim == 128) {
    const uint2 bits = *reinterpret_cast<const uint2*>(row + 4 * lane);
    x[0] = __uint_as_float(bits.x << 16);
    x[1] = __uint_as_float(bits.x & 0xffff0000u);
    x[2] = __uint_as_float(bits.y << 16);
    x[3] = __uint_as_float(bits.y & 0xffff0000u);
  } else {
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(row + 2 * lane);
    x[0] = __uint_as_float(bits << 16);
    x[1] = __uint_as_float(bits & 0xffff0000u);
  }
}
template <int kDim>
__device__ __forceinline__ void LoadInt8(const int8_t* row, float (&x)[kDim / 32]) {
  const int lane = threadIdx.x % 32;
  if constexpr (kDim == 128) {
    const char4 bytes = *reinterpret_cast<const char4*>(row + 4 * lane);
    x[0] = bytes.x, x[1] = bytes.y, x[2] = bytes.z, x[3] = bytes.w;
  } else {
    const char2 bytes = *reinterpret_cast<const char2*>(row + 2 * lane);
    x[0] = bytes.x, x[1] = bytes.y;
  }
}

// The group's queries in registers. What belongs to q head h of it, lane h knows.
template <int kDim, int kGroup>
struct Queries {
  static constexpr int kShare = kDim / 32;
  float q[kGroup][kShare];
  int group;
  float of_centre = 0;  // what the centre adds to every score

  __device__ Queries(const SummaryAttentionCudaParams& p, int head)
      : group(static_cast<int>(p.group)) {
    const int lane = threadIdx.x % 32;
    float centre[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      centre[i] = p.table.centre[static_cast<int64_t>(head) * kDim + kShare * lane + i];
    }
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) q[h][i] = 0;
      if (h >= group) continue;
      LoadBf16<kDim>(p.q + (static_cast<int64_t>(head) * group + h) * kDim, q[h]);
    }
    of_centre = p.scale * Dot(centre);
  }

  // <q[h], x> in lane h.
  __device__ __forceinline__ float Dot(const float (&x)[kShare]) const {
    float mine = 0;
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      if (h >= group) break;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kShare; ++i) sum += q[h][i] * x[i];
      sum = WarpSum(sum);
      if (static_cast<int>(threadIdx.x % 32) == h) mine = sum;
    }
    return mine;
  }
};

__device__ __forceinline__ int SelectedOf(const SummaryAttentionCudaParams& p, int head) {
  return p.row_count == nullptr ? static_cast<int>(p.selected) : p.row_count[head];
}
__device__ __forceinline__ int64_t PlaceOf(const SummaryAttentionCudaParams& p, int head, int j) {
  const int64_t place = p.gathered            ? j
                        : p.places == nullptr ? p.ids[head * p.ids_stride + j]
                                              : p.places[head * p.places_stride + j];
  return head * p.kv.row_stride + place;
}
__device__ __forceinline__ int ClusterOf(const SummaryAttentionCudaParams& p, int head, int j) {
  const int64_t row = p.ids[head * p.ids_stride + j];
  const SummarySegments& s = p.table.segments;
  return static_cast<int>((s.first + row) / s.segment_rows * s.segment_clusters) +
         p.table.row_cluster[head * p.table.rows + row];
}

// What a block knows of its queries.
template <int kDim, int kGroup>
struct Group {
  int8_t part[2][kGroup][kDim];  // of q: (kHalf part[0] + part[1]) unit
  float unit[kGroup];            // scale included
  float norm[kGroup], of_centre[kGroup], bound[kGroup];
  float reduced[2][kWarps][kGroup];
  float max[kGroup], most[kGroup], total[kGroup];
  float row_max[kWarps][kGroup], row_factor[kWarps][kGroup], keep[kGroup];
};

// Parts, norms and what the centre adds. All threads; synchronises.
template <int kDim, int kGroup>
__device__ void LoadQueries(const Args& a, int head, Group<kDim, kGroup>& group) {
  constexpr int kShare = kDim / 32;
  const SummaryAttentionCudaParams& p = a.p;
  const int lane = threadIdx.x % 32;
  const float* centre = p.table.centre + static_cast<int64_t>(head) * kDim + kShare * lane;
  for (int h = threadIdx.x / 32; h < kGroup; h += kWarps) {
    float q[kShare] = {};
    if (h < p.group) LoadBf16<kDim>(p.q + (static_cast<int64_t>(head) * p.group + h) * kDim, q);
    float squares = 0, of_centre = 0, most = 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      squares += q[i] * q[i];
      of_centre += q[i] * centre[i];
      most = fmaxf(most, fabsf(q[i]));
    }
    squares = WarpSum(squares);
    of_centre = WarpSum(of_centre);
    const float unit = WarpMax(most) / (127 * kHalf);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int x = unit > 0 ? __float2int_rn(q[i] / unit) : 0;
      const int high = (x + kHalf / 2) >> 7;  // the lower part lies in -64 .. 63
      group.part[0][h][kShare * lane + i] = static_cast<int8_t>(high);
      group.part[1][h][kShare * lane + i] = static_cast<int8_t>(x - high * kHalf);
    }
    if (lane != 0) continue;
    group.unit[h] = p.scale * unit;
    group.norm[h] = p.scale * p.scale * squares;
    group.of_centre[h] = p.scale * of_centre;
  }
  __syncthreads();
}

// Of the block's selected rows, a warp each in turn: what they take from their clusters.
template <int kDim, int kGroup>
__device__ void TakeFromClusters(const Args& a, int head, const Queries<kDim, kGroup>& queries) {
  constexpr int kShare = kDim / 32;
  const SummaryAttentionCudaParams& p = a.p;
  const int lane = threadIdx.x % 32, selected = SelectedOf(p, head);
  const int first = blockIdx.x * kWarps + threadIdx.x / 32;
  const bool mine = lane < queries.group;
  const int64_t q_head = static_cast<int64_t>(head) * queries.group + lane;
  float least = INFINITY;
  for (int j = first; j < selected; j += gridDim.x * kWarps) {
    const int c = ClusterOf(p, head, j);
    const int64_t cluster = head * p.table.clusters + c;
    float key[kShare], mean[kShare];
    LoadBf16<kDim>(p.kv.k + PlaceOf(p, head, j) * kDim, key);
    LoadInt8<kDim>(p.table.keys + cluster * kDim, mean);
    const float score = p.scale * queries.Dot(key);
    const float of_mean = p.scale * p.table.of_cluster[cluster].key_scale * queries.Dot(mean);
    if (lane == 0) atomicAdd(&a.w.gone[cluster], 1);
    if (mine) {
      const float above = score - queries.of_centre - of_mean;
      const int64_t at = q_head * p.table.clusters + c;
      atomicAdd(reinterpret_cast<unsigned long long*>(&a.w.sum[at]),
                static_cast<unsigned long long>(__float2ll_rn(above * kFixed)));
      atomicAdd(reinterpret_cast<unsigned long long*>(&a.w.squares[at]),
                static_cast<unsigned long long>(__float2ll_rn(above * above * kFixed)));
    }
    if (p.base != nullptr) {
      least = fminf(least, WarpMax(mine ? score - p.base[q_head] : -INFINITY));
    }
  }
  if (p.base != nullptr && lane == 0 && first < selected) {
    atomicMax(&a.w.least[head], ~Ordered(least));
  }
}

// The score of a cluster of which rows are selected, not bounded.
__device__ __forceinline__ float ScoreOfRest(const Args& a, int64_t at, float rows, int gone,
                                             float mean, float variance) {
  const float left = rows - static_cast<float>(gone);
  if (left <= 0) return -INFINITY;
  const float sum = static_cast<float>(__ldcg(&a.w.sum[at])) / kFixed;
  const float squares = static_cast<float>(__ldcg(&a.w.squares[at])) / kFixed;
  const float shift = fminf(-sum / left, 0.0f);
  const float rest = (rows * variance - squares) / left - shift * shift;
  return mean + shift + fminf(fmaxf(rest, 0.0f), variance) / 2;
}

// What the V of this warp's selected rows takes away, over exp(group.row_max of the warp): this
// lane's share of each q head's row.
template <int kDim, int kGroup>
__device__ void SumSelected(const Args& a, int head, const Queries<kDim, kGroup>& queries,
                            Group<kDim, kGroup>& group, float (&out)[kGroup][kDim / 32]) {
  constexpr int kShare = kDim / 32;
  const SummaryAttentionCudaParams& p = a.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, selected = SelectedOf(p, head);
  const bool mine = lane < queries.group;
  const int64_t q_head = static_cast<int64_t>(head) * queries.group + lane;
  float max = -INFINITY;
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) out[h][i] = 0;
  }
  for (int j = blockIdx.x * kWarps + warp; j < selected; j += gridDim.x * kWarps) {
    const int c = ClusterOf(p, head, j);
    const int64_t cluster = head * p.table.clusters + c;
    float value[kShare], mean[kShare];
    LoadBf16<kDim>(p.kv.v + PlaceOf(p, head, j) * kDim, value);
    LoadInt8<kDim>(p.table.keys + cluster * kDim, mean);
    const SummaryTable::Cluster of = p.table.of_cluster[cluster];
    const float of_mean = p.scale * of.key_scale * queries.Dot(mean);
    float score = -INFINITY;
    if (mine) {
      score = ScoreOfRest(a, q_head * p.table.clusters + c, of.rows, __ldcg(&a.w.gone[cluster]),
                          of_mean, of.spread * group.norm[lane]);
      score = fminf(score, group.bound[lane]);
    }
    const float next = fmaxf(max, score);
    const float keep = max == -INFINITY ? 0.0f : __expf(max - next);
    const float weight = score == -INFINITY ? 0.0f : __expf(score - next);
    max = next;
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      if (h >= queries.group) break;
      const float of_before = __shfl_sync(~0u, keep, h), of_row = __shfl_sync(~0u, weight, h);
#pragma unroll
      for (int i = 0; i < kShare; ++i) out[h][i] = out[h][i] * of_before - of_row * value[i];
    }
  }
  if (lane < kGroup) group.row_max[warp][lane] = max;
}

}  // namespace carrel::kernels::summary
