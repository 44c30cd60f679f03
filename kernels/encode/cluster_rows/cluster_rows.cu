// Rows are A of the tensor cores, 32 to a warp; what they are multiplied by is B, once per block in
// shared memory in the order in which lanes take it. Where clusters are summed, a block of threads
// takes one: it lists the cluster's rows in order, then its threads share columns and rows of that
// list, so that no atomics are needed and the order of a sum is always the same.
#include <cuda_bf16.h>

#include "kernels/encode/cluster_rows/cluster_rows.h"
#include "kernels/launch-inl.cuh"
#include "kernels/mma-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kWarpRows = 32, kBlockRows = kWarps * kWarpRows;
static_assert(kThreads * 32 == kMaxClusterSegmentRows);  // each thread looks through 32 rows
static_assert(kWarps * 16 == kMaxClusterQueries);        // each warp has 16 queries
static_assert(kThreads == kMaxSegmentClusters);

struct Segment {
  int64_t first;       // row
  int64_t first_mean;  // of means and bias
  int rows, clusters;
  uint8_t* bytes;
  uint8_t* row_clusters;
};

__device__ __forceinline__ Segment SegmentOf(const ClusterRowsParams& p, int64_t index) {
  Segment s;
  s.first = index * p.segment_rows;
  s.first_mean = index * ((p.segment_rows + p.cluster_rows - 1) / p.cluster_rows);
  s.rows = static_cast<int>(min(p.segment_rows, p.rows - s.first));
  s.clusters = static_cast<int>((s.rows + p.cluster_rows - 1) / p.cluster_rows);
  s.bytes = p.segments + index * p.segment_stride;
  s.row_clusters = s.bytes + (16 + 2 * p.head_dim) * s.clusters;
  return s;
}

__device__ __forceinline__ void Widen(const uint4& x, float (&out)[8]) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Eight elements of a row less those of `from`.
__device__ __forceinline__ uint4 Less(const uint4& x, const float* from) {
  float v[8];
  Widen(x, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] -= from[i];
  return {PackBf16(v[0], v[1]), PackBf16(v[2], v[3]), PackBf16(v[4], v[5]), PackBf16(v[6], v[7])};
}

// Rows [0, count) of a matrix as B, zeros up to `tiles` of 8: of tile i a lane takes the j-th 16
// bytes at staged[(i * kDim / 32 + j) * 32 + lane].
template <int kDim>
__device__ __forceinline__ void Stage(const uint16_t* matrix, int count, int tiles, uint4* staged) {
  constexpr int kLoads = kDim / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = threadIdx.x / 32; i < tiles * kLoads; i += kWarps) {
    const int row = i / kLoads * 8 + g;
    uint4 x = {};
    if (row < count) x = LoadStream16(matrix + row * kDim + i % kLoads * 32 + 8 * t);
    staged[i * 32 + lane] = x;
  }
}

// Rows first + g + 8 r as A; beyond the last, that one.
template <int kDim>
__device__ __forceinline__ void LoadRows(const uint16_t* rows, int64_t first, int64_t last,
                                         uint4 (&x)[4][kDim / 32]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const uint16_t* at = rows + min(first + g + 8 * r, last) * kDim + 8 * t;
#pragma unroll
    for (int j = 0; j < kDim / 32; ++j) x[r][j] = LoadStream16(at + 32 * j);
  }
}

// Grid: blocks of rows.
template <int kDim, bool kTransform>
__global__ void __launch_bounds__(kThreads, 2) CentreRowsKernel(const ClusterRowsParams p) {
  constexpr int kLoads = kDim / 32;
  extern __shared__ uint4 staged[];
  __shared__ float centre[kDim];
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (threadIdx.x < kDim) centre[threadIdx.x] = p.centre[threadIdx.x];
  if constexpr (kTransform) Stage<kDim>(p.transform, kDim, kDim / 8, staged);
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * kBlockRows + threadIdx.x / 32 * kWarpRows;
  if (first >= p.rows) return;
  uint4 x[4][kLoads];
  LoadRows<kDim>(p.keys, first, p.rows - 1, x);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      x[r][j] = Less(x[r][j], centre + 32 * j + 8 * t);
      const int64_t row = first + g + 8 * r;
      if (!kTransform && row < p.rows) {
        *reinterpret_cast<uint4*>(p.x + row * kDim + 32 * j + 8 * t) = x[r][j];
      }
    }
  }
  if constexpr (kTransform) {
#pragma unroll 2
    for (int tile = 0; tile < kDim / 8; ++tile) {
      float low[4] = {}, high[4] = {};
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const uint4 b = staged[(tile * kLoads + j) * 32 + threadIdx.x % 32];
        MmaPair(low, x[0][j], x[1][j], b);
        MmaPair(high, x[2][j], x[3][j], b);
      }
      const uint32_t pairs[4] = {PackBf16(low[0], low[1]), PackBf16(low[2], low[3]),
                                 PackBf16(high[0], high[1]), PackBf16(high[2], high[3])};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int64_t row = first + g + 8 * r;
        if (row < p.rows) {
          *reinterpret_cast<uint32_t*>(p.x + row * kDim + 8 * tile + 2 * t) = pairs[r];
        }
      }
    }
  }
}

// Grid: (blocks of rows of a segment, segments). A lane looks for the best of two columns of each
// tile, a quad then for the best of its lanes.
template <int kDim>
__global__ void __launch_bounds__(kThreads, 2) AssignRowsKernel(const ClusterRowsParams p) {
  constexpr int kLoads = kDim / 32;
  extern __shared__ uint4 staged[];
  __shared__ float2 bias[kMaxSegmentClusters / 2];
  const Segment s = SegmentOf(p, blockIdx.y);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int block_first = static_cast<int>(blockIdx.x) * kBlockRows;
  if (block_first >= s.rows) return;
  const int tiles = (s.clusters + 7) / 8;
  Stage<kDim>(p.means + s.first_mean * kDim, s.clusters, tiles, staged);
  // Never the best: what is no cluster.
  reinterpret_cast<float*>(bias)[threadIdx.x] =
      static_cast<int>(threadIdx.x) < s.clusters ? p.bias[s.first_mean + threadIdx.x] : -INFINITY;
  __syncthreads();
  const int first = block_first + static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  if (first >= s.rows) return;
  uint4 x[4][kLoads];
  LoadRows<kDim>(p.x + s.first * kDim, first, s.rows - 1, x);
  float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  int cluster[4] = {};
#pragma unroll 2
  for (int tile = 0; tile < tiles; ++tile) {
    const int column = 8 * tile + 2 * t;
    const float2 from = bias[column / 2];
    float low[4] = {from.x, from.y, from.x, from.y}, high[4] = {from.x, from.y, from.x, from.y};
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint4 b = staged[(tile * kLoads + j) * 32 + lane];
      MmaPair(low, x[0][j], x[1][j], b);
      MmaPair(high, x[2][j], x[3][j], b);
    }
    const auto take = [&](int r, float score, int of) {
      if (score > best[r]) {
        best[r] = score;
        cluster[r] = of;
      }
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      take(0, low[i], column + i);
      take(1, low[2 + i], column + i);
      take(2, high[i], column + i);
      take(3, high[2 + i], column + i);
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int away = 1; away < 4; away *= 2) {
      const float score = __shfl_xor_sync(~0u, best[r], away);
      const int of = __shfl_xor_sync(~0u, cluster[r], away);
      if (score > best[r] || (score == best[r] && of < cluster[r])) {
        best[r] = score;
        cluster[r] = of;
      }
    }
    const int row = first + g + 8 * r;
    if (t == 0 && row < s.rows) s.row_clusters[row] = static_cast<uint8_t>(cluster[r]);
  }
}

// What a block of threads shares that works on one cluster.
template <int kDim>
struct ClusterScratch {
  uint16_t rows[kMaxClusterSegmentRows];  // the cluster's, ascending
  float partial[kThreads * 8 / kDim][kDim];
  float around[kDim];
  float of_warp[kWarps];
  int rows_of_warp[kWarps];
};

// Over all threads, the same order always; every thread gets it.
template <typename Join>
__device__ __forceinline__ float Reduce(float x, float (&of_warp)[kWarps], const Join& join) {
#pragma unroll
  for (int away = 16; away > 0; away /= 2) x = join(x, __shfl_xor_sync(~0u, x, away));
  __syncthreads();  // what of_warp held was read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  float all = of_warp[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) all = join(all, of_warp[w]);
  return all;
}
struct Plus {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Larger {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Lists the rows of a cluster and returns how many there are.
template <int kDim>
__device__ __forceinline__ int CollectRows(const Segment& s, int cluster, ClusterScratch<kDim>& c) {
  const int thread = static_cast<int>(threadIdx.x), first = 32 * thread, lane = thread % 32;
  uint32_t mine = 0;  // a bit for each of 32 rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (first + 16 * half >= s.rows) continue;
    const uint4 bytes = *reinterpret_cast<const uint4*>(s.row_clusters + first + 16 * half);
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t equal = __vcmpeq4(words[i], 0x01010101u * static_cast<uint32_t>(cluster));
      mine |= ((equal & 0x08040201u) * 0x01010101u >> 24) << (16 * half + 4 * i);
    }
  }
  if (first < s.rows && first + 32 > s.rows) mine &= (1u << (s.rows - first)) - 1;
  int up_to = __popc(mine);  // this lane, of the warp
#pragma unroll
  for (int away = 1; away < 32; away *= 2) {
    const int before = __shfl_up_sync(~0u, up_to, away);
    if (lane >= away) up_to += before;
  }
  if (lane == 31) c.rows_of_warp[thread / 32] = up_to;
  __syncthreads();
  int at = up_to - __popc(mine), count = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < thread / 32) at += c.rows_of_warp[w];
    count += c.rows_of_warp[w];
  }
  for (; mine != 0; mine &= mine - 1) {
    c.rows[at++] = static_cast<uint16_t>(first + __ffs(static_cast<int>(mine)) - 1);
  }
  __syncthreads();
  return count;
}

// The mean of column threadIdx.x of the listed rows, at least one; anything beyond the columns.
template <int kDim>
__device__ __forceinline__ float ColumnMean(const uint16_t* rows, int count,
                                            ClusterScratch<kDim>& c) {
  constexpr int kColumns = kDim / 8, kParts = kThreads / kColumns;
  const int column = threadIdx.x % kColumns * 8, part = threadIdx.x / kColumns;
  float sum[8] = {};
#pragma unroll 4
  for (int i = part; i < count; i += kParts) {
    float x[8];
    Widen(LoadStream16(rows + int64_t{c.rows[i]} * kDim + column), x);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += x[j];
  }
  __syncthreads();  // what partial held was read
#pragma unroll
  for (int j = 0; j < 8; ++j) c.partial[part][column + j] = sum[j];
  __syncthreads();
  float total = 0;
  for (int i = 0; threadIdx.x < kDim && i < kParts; ++i) total += c.partial[i][threadIdx.x];
  return total / static_cast<float>(count);
}

// Rounds and stores column threadIdx.x of a cluster's mean, and all of its bias.
template <int kDim>
__device__ __forceinline__ void StoreMean(const ClusterRowsParams& p, int64_t cluster, float mean,
                                          float (&of_warp)[kWarps]) {
  const __nv_bfloat16 rounded = __float2bfloat16_rn(mean);
  if (threadIdx.x < kDim) p.means[cluster * kDim + threadIdx.x] = __bfloat16_as_ushort(rounded);
  const float x = threadIdx.x < kDim ? __bfloat162float(rounded) : 0.0f;
  const float norm = Reduce(x * x, of_warp, Plus());
  if (threadIdx.x == 0) p.bias[cluster] = -norm / 2;
}

// Grid of this and the two like it: (clusters, segments).
template <int kDim>
__global__ void __launch_bounds__(kThreads) StartMeansKernel(const ClusterRowsParams p) {
  __shared__ float of_warp[kWarps];
  const Segment s = SegmentOf(p, blockIdx.y);
  const int64_t cluster = blockIdx.x;
  if (cluster >= s.clusters) return;
  const int64_t row = s.first + (2 * cluster + 1) * s.rows / (2 * s.clusters);
  const uint32_t bits = threadIdx.x < kDim ? p.x[row * kDim + threadIdx.x] : 0;
  StoreMean<kDim>(p, s.first_mean + cluster, __uint_as_float(bits << 16), of_warp);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) UpdateMeansKernel(const ClusterRowsParams p) {
  __shared__ ClusterScratch<kDim> c;
  const Segment s = SegmentOf(p, blockIdx.y);
  const int cluster = static_cast<int>(blockIdx.x);
  if (cluster >= s.clusters) return;
  const int count = CollectRows(s, cluster, c);
  if (count == 0) return;
  StoreMean<kDim>(p, s.first_mean + cluster, ColumnMean<kDim>(p.x + s.first * kDim, count, c),
                  c.of_warp);
}

// A mean in int8, of which this thread has column threadIdx.x; returns what int8 says.
template <int kDim>
__device__ __forceinline__ float Quantise(float mean, float* scale_out, uint8_t* out,
                                          float (&of_warp)[kWarps]) {
  const bool has = threadIdx.x < kDim;
  const float scale = Reduce(has ? fabsf(mean) : 0.0f, of_warp, Larger()) / 127;
  const float x = scale == 0 ? 0.0f : fminf(fmaxf(rintf(mean / scale), -127.0f), 127.0f);
  if (has) out[threadIdx.x] = static_cast<uint8_t>(static_cast<int8_t>(x));
  if (threadIdx.x == 0) *scale_out = scale;
  return scale * x;
}

// Of the listed rows about c.around. Queries are B, 16 to a warp; listed rows are A, 16 at a time.
template <int kDim>
__device__ __forceinline__ float LearnedSpread(const ClusterRowsParams& p, const uint16_t* keys,
                                               int count, ClusterScratch<kDim>& c) {
  constexpr int kLoads = kDim / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int first_query = static_cast<int>(threadIdx.x) / 32 * 16;
  float product = 0;
  if (first_query < p.query_count) {
    uint4 query[2][kLoads] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (first_query + 8 * i + g >= p.query_count) continue;
      const uint16_t* at = p.queries + (first_query + 8 * i + g) * kDim + 8 * t;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) query[i][j] = LoadStream16(at + 32 * j);
    }
    // The mean, not the sum, of the exponentials: it cannot overflow.
    const float log_count = logf(static_cast<float>(count));
    float mean[4] = {};  // of queries first_query + 2t, + 1, + 8, + 9
    for (int first = 0; first < count; first += 16) {
      const int low = first + g, high = low + 8;
      const uint16_t* at[2] = {keys + int64_t{c.rows[min(low, count - 1)]} * kDim + 8 * t,
                               keys + int64_t{c.rows[min(high, count - 1)]} * kDim + 8 * t};
      uint4 x[2][kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {  // all warps read these rows: the second from L1
          x[r][j] = Less(__ldg(reinterpret_cast<const uint4*>(at[r] + 32 * j)),
                         c.around + 32 * j + 8 * t);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float score[4] = {};
#pragma unroll
        for (int j = 0; j < kLoads; ++j) MmaPair(score, x[0][j], x[1][j], query[i][j]);
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const auto weight = [&](float above) { return expf(fminf(above, 80.0f) - log_count); };
          if (low < count) mean[2 * i + column] += weight(score[column]);
          if (high < count) mean[2 * i + column] += weight(score[2 + column]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int away = 4; away < 32; away *= 2) mean[i] += __shfl_xor_sync(~0u, mean[i], away);
      const int query_index = first_query + 2 * t + i % 2 + i / 2 * 8;
      if (g == 0 && query_index < p.query_count) {
        product += p.weights[query_index] * logf(mean[i]);
      }
    }
  }
  return fmaxf(0.0f, Reduce(product, c.of_warp, Plus()));
}

template <int kDim>
__device__ __forceinline__ float IsotropicSpread(const uint16_t* keys, int count,
                                                 ClusterScratch<kDim>& c) {
  constexpr int kColumns = kDim / 8, kParts = kThreads / kColumns;
  const int column = threadIdx.x % kColumns * 8;
  float squares = 0;
  for (int i = threadIdx.x / kColumns; i < count; i += kParts) {
    float x[8];
    Widen(LoadStream16(keys + int64_t{c.rows[i]} * kDim + column), x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float away = x[j] - c.around[column + j];
      squares += away * away;
    }
  }
  return Reduce(squares, c.of_warp, Plus()) / (static_cast<float>(count) * kDim);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) DescribeClustersKernel(const ClusterRowsParams p) {
  __shared__ ClusterScratch<kDim> c;
  const Segment s = SegmentOf(p, blockIdx.y);
  const int cluster = static_cast<int>(blockIdx.x);
  if (cluster >= s.clusters) return;
  const int count = CollectRows(s, cluster, c);
  auto* const sizes = reinterpret_cast<uint32_t*>(s.bytes);
  auto* const key_scales = reinterpret_cast<float*>(sizes + s.clusters);
  float* const value_scales = key_scales + s.clusters;
  float* const spreads = value_scales + s.clusters;
  auto* const key_means = reinterpret_cast<uint8_t*>(spreads + s.clusters);
  uint8_t* const value_means = key_means + s.clusters * kDim;
  const uint16_t* const keys = p.keys + s.first * kDim;
  const float centre = threadIdx.x < kDim ? p.centre[threadIdx.x] : 0.0f;

  const float key = count == 0 ? 0.0f : ColumnMean<kDim>(keys, count, c) - centre;
  const float said =
      Quantise<kDim>(key, key_scales + cluster, key_means + cluster * kDim, c.of_warp);
  if (threadIdx.x < kDim) c.around[threadIdx.x] = centre + said;
  const float value = count == 0 ? 0.0f : ColumnMean<kDim>(p.values + s.first * kDim, count, c);
  Quantise<kDim>(value, value_scales + cluster, value_means + cluster * kDim, c.of_warp);
  const float spread = count == 0          ? 0.0f
                       : p.query_count > 0 ? LearnedSpread<kDim>(p, keys, count, c)
                                           : IsotropicSpread<kDim>(keys, count, c);
  if (threadIdx.x == 0) {
    sizes[cluster] = static_cast<uint32_t>(count);
    spreads[cluster] = spread;
  }
}

bool Served(const ClusterRowsParams& p) {
  return (p.head_dim == 64 || p.head_dim == 128) && p.rows >= 0 && p.segment_rows >= 1 &&
         p.segment_rows <= kMaxClusterSegmentRows && p.cluster_rows >= 1 &&
         p.max_clusters() <= kMaxSegmentClusters && p.segment_count() <= 65535 &&
         p.query_count >= 0 && p.query_count <= kMaxClusterQueries && p.segment_stride % 16 == 0 &&
         p.segment_stride >= (16 + 2 * p.head_dim) * p.max_clusters() + p.segment_rows;
}

using Kernel = void (*)(ClusterRowsParams);

cudaError_t Launch(Kernel kernel, const ClusterRowsParams& p, dim3 grid, int64_t shared,
                   cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  RETURN_IF_FAILED(AllowShared(kernel, shared));
  return kernels::Launch({.grid = grid, .threads = kThreads, .shared_bytes = shared}, stream,
                         kernel, p);
}

// A block per cluster.
cudaError_t LaunchByCluster(Kernel of64, Kernel of128, const ClusterRowsParams& p,
                            cudaStream_t stream) {
  if (!Served(p)) return cudaErrorInvalidValue;
  return Launch(
      p.head_dim == 64 ? of64 : of128, p,
      dim3(static_cast<unsigned>(p.max_clusters()), static_cast<unsigned>(p.segment_count())), 0,
      stream);
}

unsigned RowBlocks(int64_t rows) {
  return static_cast<unsigned>((rows + kBlockRows - 1) / kBlockRows);
}

}  // namespace

cudaError_t CentreRows(const ClusterRowsParams& p, cudaStream_t stream) {
  if (!Served(p)) return cudaErrorInvalidValue;
  const bool transform = p.transform != nullptr;
  const Kernel kernel =
      p.head_dim == 64 ? (transform ? CentreRowsKernel<64, true> : CentreRowsKernel<64, false>)
                       : (transform ? CentreRowsKernel<128, true> : CentreRowsKernel<128, false>);
  return Launch(kernel, p, dim3(RowBlocks(p.rows)), transform ? 2 * p.head_dim * p.head_dim : 0,
                stream);
}

cudaError_t StartMeans(const ClusterRowsParams& p, cudaStream_t stream) {
  return LaunchByCluster(StartMeansKernel<64>, StartMeansKernel<128>, p, stream);
}

cudaError_t AssignRows(const ClusterRowsParams& p, cudaStream_t stream) {
  if (!Served(p)) return cudaErrorInvalidValue;
  return Launch(p.head_dim == 64 ? AssignRowsKernel<64> : AssignRowsKernel<128>, p,
                dim3(RowBlocks(p.segment_rows), static_cast<unsigned>(p.segment_count())),
                (p.max_clusters() + 7) / 8 * 8 * 2 * p.head_dim, stream);
}

cudaError_t UpdateMeans(const ClusterRowsParams& p, cudaStream_t stream) {
  return LaunchByCluster(UpdateMeansKernel<64>, UpdateMeansKernel<128>, p, stream);
}

cudaError_t DescribeClusters(const ClusterRowsParams& p, cudaStream_t stream) {
  return LaunchByCluster(DescribeClustersKernel<64>, DescribeClustersKernel<128>, p, stream);
}

}  // namespace carrel::kernels
