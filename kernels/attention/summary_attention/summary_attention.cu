// One launch. First every block takes what its selected rows take from their clusters (integers, so
// that their order does not matter) and, while a barrier gathers that, the products of its
// clusters' keys, as int8 by the queries in two int8 parts on tensor cores. Then its clusters' part
// of the sums, their V as fp16, which holds int8 exactly; V rows of selected rows leave; the last
// block of a KV head joins.
#include <cuda_fp16.h>

#include <algorithm>

#include "common/cuda/runtime.h"
#include "kernels/attention/summary_attention/selected_rows-inl.cuh"
#include "kernels/attention/summary_attention/summary_attention_cuda.h"
#include "kernels/mma-inl.cuh"
#include "kernels/score_select-inl.cuh"

namespace carrel::kernels {
namespace {

using namespace summary;  // NOLINT(google-build-using-namespace)

// Means of the scores of the clusters [begin, end): scores [kGroup, share].
template <int kDim, int kGroup>
__device__ void MeanScores(const Args& a, int head, int begin, int end,
                           const Group<kDim, kGroup>& group, float* scores) {
  constexpr int kQuads = kGroup / 4, kLoads = kDim / 64;
  const SummaryAttentionCudaParams& p = a.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t of_head = head * p.table.clusters;
  // Column g of B: part g % 2 of q head g / 2 of a quad of heads.
  uint4 q[kQuads][kLoads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      q[i][j] = *reinterpret_cast<const uint4*>(&group.part[g % 2][4 * i + g / 2][64 * j + 16 * t]);
    }
  }
  uint4 x[2][kLoads];
  float scale[2];
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t cluster = of_head + min(tile + 8 * i + g, end - 1);
      scale[i] = p.table.of_cluster[cluster].key_scale;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        x[i][j] = LoadStream16(p.table.keys + cluster * kDim + 64 * j + 16 * t);
      }
    }
  };
  const auto add = [](int(&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                      uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  };
  const int first = begin + warp * kTile;
  if (first < end) load(first);
  for (int tile = first; tile < end; tile += kWarps * kTile) {
    int c[kQuads][4] = {};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        add(c[i], x[0][j].x, x[1][j].x, x[0][j].y, x[1][j].y, q[i][j].x, q[i][j].y);
        add(c[i], x[0][j].z, x[1][j].z, x[0][j].w, x[1][j].w, q[i][j].z, q[i][j].w);
      }
    }
    const float low_scale = scale[0], high_scale = scale[1];
    if (tile + kWarps * kTile < end) load(tile + kWarps * kTile);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int h = 4 * i + t;
      float* at = scores + h * a.share + tile - begin + g;
      at[0] = group.unit[h] * low_scale * static_cast<float>(kHalf * c[i][0] + c[i][1]);
      at[8] = group.unit[h] * high_scale * static_cast<float>(kHalf * c[i][2] + c[i][3]);
    }
  }
}

// out [kGroup]: of all warps' values. All threads; synchronises.
template <int kGroup, bool kMax>
__device__ void OverBlock(const float (*of_warps)[kGroup], float* out) {
  __syncthreads();
  if (threadIdx.x < kGroup) {
    float x = of_warps[0][threadIdx.x];
    for (int w = 1; w < kWarps; ++w) {
      const float other = of_warps[w][threadIdx.x];
      x = kMax ? fmaxf(x, other) : x + other;
    }
    out[threadIdx.x] = x;
  }
  __syncthreads();
}

// scores become what the clusters' V weigh, over group.most; maxima and sums of the exponentials.
template <int kDim, int kGroup>
__device__ void WeighClusters(const Args& a, int head, int begin, int end,
                              Group<kDim, kGroup>& group, float* scores) {
  const SummaryAttentionCudaParams& p = a.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = static_cast<int>(p.group);
  const int64_t of_head = head * p.table.clusters;
  const int last = (end - begin + kTile - 1) / kTile * kTile;
  // A lane keeps to its clusters: what it writes nobody else reads before the next barrier.
  float of_lane[kGroup];
#pragma unroll
  for (int h = 0; h < kGroup; ++h) of_lane[h] = -INFINITY;
  for (int i = threadIdx.x; i < last; i += kThreads) {
    const int64_t cluster = of_head + begin + i;
    const bool there = begin + i < end;
    const SummaryTable::Cluster of = there ? p.table.of_cluster[cluster] : SummaryTable::Cluster{};
    const int gone = there ? __ldcg(&a.w.gone[cluster]) : 0;
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      float score = -INFINITY;
      if (h < heads && of.rows - static_cast<float>(gone) > 0) {
        const float mean = scores[h * a.share + i], variance = of.spread * group.norm[h];
        score = mean + variance / 2;
        if (gone > 0) {
          const int64_t q_head = static_cast<int64_t>(head) * heads + h;
          score =
              ScoreOfRest(a, q_head * p.table.clusters + begin + i, of.rows, gone, mean, variance);
        }
        score = fminf(score, group.bound[h]);
      }
      scores[h * a.share + i] = score;
      of_lane[h] = fmaxf(of_lane[h], score);
    }
  }
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    const float most = WarpMax(of_lane[h]);
    if (lane == 0) group.reduced[0][warp][h] = most;
  }
  OverBlock<kGroup, true>(group.reduced[0], group.max);
  float total[kGroup];
#pragma unroll
  for (int h = 0; h < kGroup; ++h) of_lane[h] = total[h] = 0;
  for (int i = threadIdx.x; i < last; i += kThreads) {
    const int64_t cluster = of_head + begin + i;
    const bool there = begin + i < end;
    const SummaryTable::Cluster of = there ? p.table.of_cluster[cluster] : SummaryTable::Cluster{};
    const float left = of.rows - static_cast<float>(there ? __ldcg(&a.w.gone[cluster]) : 0);
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      const float score = scores[h * a.share + i];
      const float e = score == -INFINITY ? 0.0f : __expf(score - group.max[h]);
      const float weight = e * of.rows * of.value_scale;
      scores[h * a.share + i] = weight;
      total[h] += left * e;
      of_lane[h] = fmaxf(of_lane[h], weight);
    }
  }
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    const float most = WarpMax(of_lane[h]), sum = WarpSum(total[h]);
    if (lane == 0) {
      group.reduced[0][warp][h] = most;
      group.reduced[1][warp][h] = sum;
    }
  }
  OverBlock<kGroup, true>(group.reduced[0], group.most);
  OverBlock<kGroup, false>(group.reduced[1], group.total);
}

// Of bytes of two words, a signed pair as fp16: 1024 + 128 + x, less that.
__device__ __forceinline__ uint32_t PairOfBytes(uint32_t a, uint32_t b, int byte) {
  const uint32_t raw = __byte_perm(a, b, byte | (byte + 4) << 4);  // in bytes 0 and 1
  const uint32_t spread = __byte_perm(raw ^ 0x8080u, 0x64646464u, 0x4140);
  uint32_t pair;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(spread), "r"(0x64806480u));
  return pair;
}

// This warp's part of the weighted sums of the clusters' V: into out [kGroup, kDim].
template <int kDim, int kGroup>
__device__ void SumValues(const Args& a, int head, int begin, int end,
                          const Group<kDim, kGroup>& group, const float* weights, float* out) {
  constexpr int kShares = kGroup > 8 ? 2 : 1;  // of 8 q heads
  constexpr int kWords = kDim / 32, kProducts = kDim / 16;
  const SummaryAttentionCudaParams& p = a.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int8_t* values = p.table.values + head * p.table.clusters * kDim + kDim / 8 * g;
  float c[kShares][kProducts][4] = {};
  float inverse[kShares];
#pragma unroll
  for (int s = 0; s < kShares; ++s) {
    const float most = g + 8 * s < kGroup ? group.most[g + 8 * s < kGroup ? g + 8 * s : 0] : 0.0f;
    inverse[s] = most > 0 ? 1.0f / most : 0.0f;
  }
  uint32_t x[4][kWords];
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = min(tile + 2 * t + i % 2 + 8 * (i / 2), end - 1);
      const int8_t* at = values + static_cast<int64_t>(row) * kDim;
      if constexpr (kWords == 4) {
        const uint4 of_row = LoadStream16(at);
        x[i][0] = of_row.x, x[i][1] = of_row.y, x[i][2] = of_row.z, x[i][3] = of_row.w;
      } else {
        const uint2 of_row = LoadStream8(at);
        x[i][0] = of_row.x, x[i][1] = of_row.y;
      }
    }
  };
  const int first = begin + warp * kTile;
  if (first < end) load(first);
  for (int tile = first; tile < end; tile += kWarps * kTile) {
    uint32_t b[kShares][2];
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
      const bool there = g + 8 * s < kGroup;
      const float* at = weights + (there ? g + 8 * s : 0) * a.share + tile - begin + 2 * t;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float even = there ? at[8 * i] * inverse[s] : 0;
        const float odd = there ? at[8 * i + 1] * inverse[s] : 0;
        const __half2 pair = __floats2half2_rn(even, odd);
        b[s][i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const int word = i / 2, byte = i % 2 * 2;
      const uint32_t a0 = PairOfBytes(x[0][word], x[1][word], byte);
      const uint32_t a1 = PairOfBytes(x[0][word], x[1][word], byte + 1);
      const uint32_t a2 = PairOfBytes(x[2][word], x[3][word], byte);
      const uint32_t a3 = PairOfBytes(x[2][word], x[3][word], byte + 1);
#pragma unroll
      for (int s = 0; s < kShares; ++s) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[s][i][0]), "+f"(c[s][i][1]), "+f"(c[s][i][2]), "+f"(c[s][i][3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[s][0]), "r"(b[s][1]));
      }
    }
    if (tile + kWarps * kTile < end) load(tile + kWarps * kTile);
  }
#pragma unroll
  for (int s = 0; s < kShares; ++s) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int h = 8 * s + 2 * t + odd;
      if (h >= kGroup) continue;
      auto* at = reinterpret_cast<float2*>(out + h * kDim + kDim / 8 * g);
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        at[i] = {group.most[h] * c[s][i][odd], group.most[h] * c[s][i][2 + odd]};
      }
    }
  }
}

// The warps' sums, over each q head's new maximum, become the block's part.
template <int kDim, int kGroup>
__device__ void StorePart(const Args& a, int head, const float (&of_rows)[kGroup][kDim / 32],
                          Group<kDim, kGroup>& group, float* sums) {
  constexpr int kShare = kDim / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = static_cast<int>(a.p.group);
  __syncthreads();
  if (threadIdx.x < kGroup) {
    const int h = threadIdx.x;
    float max = group.max[h];
    for (int w = 0; w < kWarps; ++w) max = fmaxf(max, group.row_max[w][h]);
    for (int w = 0; w < kWarps; ++w) {
      const float x = group.row_max[w][h];
      group.row_factor[w][h] = x == -INFINITY ? 0.0f : __expf(x - max);
    }
    group.keep[h] = group.max[h] == -INFINITY ? 0.0f : __expf(group.max[h] - max);
    if (h < heads) {
      const int64_t part = (static_cast<int64_t>(head) * heads + h) * gridDim.x + blockIdx.x;
      __stcg(&a.w.part_state[part], float2{max, group.total[h] * group.keep[h]});
    }
  }
  __syncthreads();
  float* own = sums + warp * kGroup * kDim;
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    const float factor = group.row_factor[warp][h], keep = group.keep[h];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      float& x = own[h * kDim + kShare * lane + i];
      x = keep * x + factor * of_rows[h][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * kDim; i += kThreads) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w * kGroup * kDim + i];
    const int64_t q_head = static_cast<int64_t>(head) * heads + i / kDim;
    __stcg(&a.w.part_out[(q_head * gridDim.x + blockIdx.x) * kDim + i % kDim], sum);
  }
}

// By the block that finishes last: the parts and the rows' own attention become the output, and the
// workspace is as it was. weights: shared memory, [kGroup, kMaxSplits].
template <int kDim, int kGroup>
__device__ void Finish(const Args& a, int head, Group<kDim, kGroup>& group, float* weights) {
  const SummaryAttentionCudaParams& p = a.p;
  const int heads = static_cast<int>(p.group), splits = gridDim.x;
  const int lane = threadIdx.x % 32;
  for (int h = threadIdx.x / 32; h < heads; h += kWarps) {
    const int64_t q_head = static_cast<int64_t>(head) * heads + h;
    const float2* states = a.w.part_state + q_head * splits;
    float max = -INFINITY, total = 0;
    for (int s = lane; s < splits; s += 32) max = fmaxf(max, __ldcg(&states[s]).x);
    max = WarpMax(max);
    for (int s = lane; s < splits; s += 32) {
      const float2 state = __ldcg(&states[s]);
      const float weight = state.x == -INFINITY ? 0.0f : __expf(state.x - max);
      weights[h * kMaxSplits + s] = weight;
      total += weight * state.y;
    }
    total = WarpSum(total);
    if (lane != 0) continue;
    // keep: of what was attended; most: of the sums. Nothing left over: all as it was.
    group.keep[h] = 1;
    group.most[h] = 0;
    if (!(total > 0)) continue;
    const float before = p.lse[q_head], rest = group.of_centre[h] + max + logf(total);
    const float both = fmaxf(before, rest) + log1pf(__expf(-fabsf(before - rest)));
    group.keep[h] = before == -INFINITY ? 0.0f : __expf(before - both);
    group.most[h] = __expf(rest - both) / total;
    p.lse[q_head] = both;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * kDim; i += kThreads) {
    const int h = i / kDim;
    if (group.most[h] == 0) continue;
    const int64_t q_head = static_cast<int64_t>(head) * heads + h;
    const float* parts = a.w.part_out + q_head * splits * kDim + i % kDim;
    float sum = 0;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) sum += weights[h * kMaxSplits + s] * __ldcg(parts + s * kDim);
    float& out = p.out[q_head * kDim + i % kDim];
    out = (group.keep[h] == 0 ? 0.0f : group.keep[h] * out) + group.most[h] * sum;
  }
  const int selected = SelectedOf(p, head);
  for (int j = threadIdx.x; j < selected; j += kThreads) {
    const int c = ClusterOf(p, head, j);
    a.w.gone[head * p.table.clusters + c] = 0;
    for (int h = 0; h < heads; ++h) {
      const int64_t at = (static_cast<int64_t>(head) * heads + h) * p.table.clusters + c;
      a.w.sum[at] = a.w.squares[at] = 0;
    }
  }
  if (threadIdx.x == 0) a.w.least[head] = 0;
}

// Grid: (splits, kv_heads).
template <int kDim, int kGroup>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) SummaryKernel(const Args a) {
  extern __shared__ __align__(16) float dynamic[];  // sums [kWarps, kGroup, kDim], then the scores
  __shared__ __align__(16) Group<kDim, kGroup> group;
  __shared__ bool last;
  AllowNextLaunch();  // every block is resident: what begins early takes no place from them
  const int head = blockIdx.y, splits = gridDim.x;
  RowSync* sync = a.w.sync + head;
  const int64_t of_block = static_cast<int64_t>(head) * splits + blockIdx.x;
  float* scores =
      a.in_shared ? dynamic + kWarps * kGroup * kDim : a.w.scores + of_block * kMaxGroup * a.share;
  const int clusters = static_cast<int>(a.p.table.clusters);
  const int begin = min(clusters, static_cast<int>(blockIdx.x) * a.share);
  const int end = min(clusters, begin + a.share);
  LoadQueries(a, head, group);
  const Queries<kDim, kGroup> queries(a.p, head);
  TakeFromClusters(a, head, queries);
  const unsigned arrived = ArriveAtRow(sync, static_cast<int>(blockIdx.x), splits);
  MeanScores(a, head, begin, end, group, scores);
  WaitForRow(sync, arrived, splits);
  if (threadIdx.x < kGroup) {
    const int h = threadIdx.x;
    const unsigned least = a.p.base == nullptr ? 0 : __ldcg(&a.w.least[head]);
    group.bound[h] =
        least == 0 || h >= a.p.group
            ? INFINITY
            : FromOrdered(~least) + a.p.base[head * a.p.group + h] - group.of_centre[h];
  }
  __syncthreads();
  WeighClusters(a, head, begin, end, group, scores);
  const int warp = threadIdx.x / 32;
  SumValues(a, head, begin, end, group, scores, dynamic + warp * kGroup * kDim);
  float of_rows[kGroup][kDim / 32];
  SumSelected(a, head, queries, group, of_rows);
  StorePart(a, head, of_rows, group, dynamic);

  // Whoever sees that all other parts are written joins them.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&sync->finished, 1u) == static_cast<unsigned>(splits - 1);
    if (last) sync->finished = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  Finish(a, head, group, dynamic);
}

// The same for the same shape on the same device: as many blocks as are resident at once, at most.
int64_t Splits(int64_t clusters, int64_t kv_heads) {
  const int64_t of_head = std::max<int64_t>(1, kBlocksPerSm * Multiprocessors() / kv_heads);
  return std::clamp<int64_t>((clusters + kSplitClusters - 1) / kSplitClusters, 1,
                             std::min<int64_t>(of_head, kMaxSplits));
}

int64_t Share(int64_t clusters, int64_t splits) {
  return ((clusters + splits - 1) / splits + kTile - 1) / kTile * kTile;
}

// Parts of a workspace, one behind the other.
class Carve {
 public:
  explicit Carve(void* at) : at_(static_cast<uint8_t*>(at)) {}
  template <class T>
  T* Next(int64_t count) {
    T* const part = reinterpret_cast<T*>(at_ + bytes_);
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return part;
  }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* at_;
  size_t bytes_ = 0;
};

// Of a block: sums of its warps, then, if they fit, its clusters' scores.
size_t SharedBytes(int64_t head_dim, int64_t padded_group, int64_t share, bool* in_shared) {
  int device = 0, most = 0;
  if (cudaGetDevice(&device) == cudaSuccess) {
    static_cast<void>(
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  }
  const auto sums = static_cast<size_t>(
      std::max<int64_t>(kWarps * padded_group * head_dim, padded_group * kMaxSplits) * 4);
  const size_t scores = static_cast<size_t>(padded_group * share * 4);
  constexpr size_t kReserved = 16384;  // a block's static arrays
  *in_shared = sums + scores + kReserved <= static_cast<size_t>(most) / kBlocksPerSm;
  return sums + (*in_shared ? scores : 0);
}

int64_t PaddedGroup(int64_t group) { return group <= 4 ? 4 : group <= 8 ? 8 : kMaxGroup; }

Workspace Lay(int64_t kv_heads, int64_t group, int64_t head_dim, int64_t clusters, Carve& carve) {
  const int64_t q_heads = kv_heads * group, splits = Splits(clusters, kv_heads);
  const int64_t share = Share(clusters, splits);
  bool in_shared = false;
  SharedBytes(head_dim, PaddedGroup(group), share, &in_shared);
  Workspace w;
  w.sync = carve.Next<RowSync>(kv_heads);
  w.least = carve.Next<unsigned>(kv_heads);
  w.gone = carve.Next<int>(kv_heads * clusters);
  w.sum = carve.Next<long long>(q_heads * clusters);
  w.squares = carve.Next<long long>(q_heads * clusters);
  w.scores = carve.Next<float>(in_shared ? 0 : kv_heads * splits * kMaxGroup * share);
  w.part_out = carve.Next<float>(q_heads * splits * head_dim);
  w.part_state = carve.Next<float2>(q_heads * splits);
  return w;
}

template <int kDim>
auto KernelFor(int64_t group) {
  return group <= 4   ? SummaryKernel<kDim, 4>
         : group <= 8 ? SummaryKernel<kDim, 8>
                      : SummaryKernel<kDim, kMaxGroup>;
}

}  // namespace

size_t SummaryWorkspaceBytes(int64_t kv_heads, int64_t group, int64_t head_dim, int64_t clusters) {
  Carve carve(nullptr);
  Lay(kv_heads, group, head_dim, clusters, carve);
  return carve.bytes();
}

cudaError_t AttendSummariesCuda(const SummaryAttentionCudaParams& p, cudaStream_t stream) {
  const SummarySegments& s = p.table.segments;
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > kMaxGroup ||
      (p.head_dim != 64 && p.head_dim != 128) || !(p.scale > 0) || p.selected < 0 ||
      p.selected > p.ids_stride || p.table.clusters < 0 || p.table.clusters > 1 << 28 ||
      s.first < 0 || s.segment_rows < 1 || s.segment_clusters < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.table.clusters == 0) return cudaSuccess;
  if (p.workspace == nullptr) return cudaErrorInvalidValue;
  Args a;
  a.p = p;
  Carve carve(p.workspace);
  a.w = Lay(p.kv_heads, p.group, p.head_dim, p.table.clusters, carve);
  const int64_t splits = Splits(p.table.clusters, p.kv_heads);
  a.share = static_cast<int>(Share(p.table.clusters, splits));
  const size_t shared = SharedBytes(p.head_dim, PaddedGroup(p.group), a.share, &a.in_shared);
  const auto kernel = p.head_dim == 64 ? KernelFor<64>(p.group) : KernelFor<128>(p.group);
  const dim3 grid(static_cast<unsigned>(splits), static_cast<unsigned>(p.kv_heads));
  return LaunchTogether(kernel, grid, kThreads, shared, a, stream);
}

}  // namespace carrel::kernels
