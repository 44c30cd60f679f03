// Three launches: what the selected rows take from their clusters (integers, so that their order
// does not matter); scores of the clusters and their part of the sums; the joining, in which V rows
// of selected rows leave their clusters' sums.
#include <algorithm>

#include "common/cuda/runtime.h"
#include "kernels/mma-inl.cuh"
#include "kernels/summary_attention/summary_attention_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kJoinThreads = 512;
constexpr int kMaxGroup = 16;
constexpr int kMaxSplits = 64;
constexpr int kSplitClusters = 32;     // a block for fewer is not worth its partial sums
constexpr float kFixed = 16777216.0f;  // 2^24: units of sums over selected rows

struct Workspace {
  unsigned* least;     // [kv_heads]: 0, or the complement of the ordered bits of t
  int* gone;           // [kv_heads, clusters]
  long long* sum;      // [q_heads, clusters]
  long long* squares;  // [q_heads, clusters]
  float* scores;       // [q_heads, clusters], of clusters that lost rows
  float* part_out;     // [q_heads, splits, head_dim]
  float2* part_state;  // [q_heads, splits]: maximum, sum of exponentials
};

struct Args {
  SummaryAttentionCudaParams p;
  Workspace w;
  int splits;
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
  return head * p.row_stride + place;
}
__device__ __forceinline__ int ClusterOf(const SummaryAttentionCudaParams& p, int head, int j) {
  const int64_t row = p.ids[head * p.ids_stride + j];
  const SummarySegments& s = p.table.segments;
  return static_cast<int>((s.first + row) / s.segment_rows * s.segment_clusters) +
         p.table.row_cluster[head * p.table.rows + row];
}

// Grid: (blocks, kv_heads); a warp per selected row.
template <int kDim, int kGroup>
__global__ void __launch_bounds__(kThreads) SelectedRowsKernel(const Args a) {
  constexpr int kShare = kDim / 32;
  WaitForEarlierLaunch();
  const SummaryAttentionCudaParams& p = a.p;
  const int head = blockIdx.y, lane = threadIdx.x % 32;
  const int selected = SelectedOf(p, head);
  const int first = blockIdx.x * kWarps + threadIdx.x / 32;
  if (first >= selected) return;
  const Queries<kDim, kGroup> queries(p, head);
  const bool mine = lane < queries.group;
  const int64_t q_head = static_cast<int64_t>(head) * queries.group + lane;
  float least = INFINITY;
  for (int j = first; j < selected; j += gridDim.x * kWarps) {
    const int c = ClusterOf(p, head, j);
    const int64_t cluster = head * p.table.clusters + c;
    float key[kShare], mean[kShare];
    LoadBf16<kDim>(p.k + PlaceOf(p, head, j) * kDim, key);
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
  if (p.base != nullptr && lane == 0) atomicMax(&a.w.least[head], ~Ordered(least));
}

// The score of what remains of a cluster, of lane h's q head; clears what was gathered of it.
__device__ __forceinline__ float ScoreOfRest(const Args& a, int64_t at, float rows, int gone,
                                             float mean, float variance) {
  const float left = rows - static_cast<float>(gone);
  const float sum = static_cast<float>(a.w.sum[at]) / kFixed;
  const float squares = static_cast<float>(a.w.squares[at]) / kFixed;
  a.w.sum[at] = a.w.squares[at] = 0;
  if (left <= 0) return -INFINITY;
  const float shift = fminf(-sum / left, 0.0f);
  const float rest = (rows * variance - squares) / left - shift * shift;
  return mean + shift + fminf(fmaxf(rest, 0.0f), variance) / 2;
}

// A block's tile: a thread per q head and cluster gives scores, then a thread per channel adds up.
template <int kDim, int kGroup>
struct Tile {
  static constexpr int kClusters = kThreads / kGroup;
  static constexpr int kLanes = kClusters < 32 ? kClusters : 32;  // of a warp, with the same q head
  static constexpr int kParts = kClusters / kLanes;
  float q[kGroup][kDim];
  float weight[kGroup][kClusters];  // of the cluster's sum of V
  float part[2][kGroup][kParts];    // maxima, sums
  float max[kGroup], total[kGroup], keep[kGroup];
  float of_centre[kGroup], norm[kGroup], bound[kGroup];
};

// Maximum or sum over the lanes that share a q head.
template <int kLanes, bool kMax>
__device__ __forceinline__ float OverLanes(float x) {
#pragma unroll
  for (int m = kLanes / 2; m > 0; m /= 2) {
    const float other = __shfl_xor_sync(~0u, x, m);
    x = kMax ? fmaxf(x, other) : x + other;
  }
  return x;
}

// q, what the centre adds, norms and bounds, for the whole block.
template <int kDim, int kGroup>
__device__ void LoadQueries(const Args& a, int head, Tile<kDim, kGroup>& tile) {
  const SummaryAttentionCudaParams& p = a.p;
  const int group = static_cast<int>(p.group), lane = threadIdx.x % 32;
  const float* centre = p.table.centre + static_cast<int64_t>(head) * kDim;
  for (int h = threadIdx.x / 32; h < group; h += kWarps) {
    const uint16_t* q = p.q + (static_cast<int64_t>(head) * group + h) * kDim;
    float squares = 0, of_centre = 0;
    for (int i = lane; i < kDim; i += 32) {
      const float x = __uint_as_float(static_cast<uint32_t>(q[i]) << 16);
      tile.q[h][i] = x;
      squares += x * x;
      of_centre += x * centre[i];
    }
    squares = WarpSum(squares);
    of_centre = WarpSum(of_centre);
    if (lane != 0) continue;
    tile.norm[h] = p.scale * p.scale * squares;
    tile.of_centre[h] = p.scale * of_centre;
    tile.max[h] = -INFINITY;
    tile.total[h] = 0;
    const unsigned least = p.base == nullptr ? 0 : a.w.least[head];
    tile.bound[h] = least == 0
                        ? INFINITY
                        : FromOrdered(~least) + p.base[static_cast<int64_t>(head) * group + h] -
                              tile.of_centre[h];
  }
}

template <int kDim>
__device__ __forceinline__ float DotInt8(const float* q, const int8_t* row) {
  uint4 bytes[kDim / 16];
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) bytes[i] = reinterpret_cast<const uint4*>(row)[i];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const uint32_t words[4] = {bytes[i].x, bytes[i].y, bytes[i].z, bytes[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 x = reinterpret_cast<const float4*>(q)[4 * i + j];
      sum += x.x * static_cast<float>(static_cast<int8_t>(words[j]));
      sum += x.y * static_cast<float>(static_cast<int8_t>(words[j] >> 8));
      sum += x.z * static_cast<float>(static_cast<int8_t>(words[j] >> 16));
      sum += x.w * static_cast<float>(static_cast<int8_t>(words[j] >> 24));
    }
  }
  return sum;
}

// The tile's weights from cluster `first` on; joins its maxima and sums with those before.
template <int kDim, int kGroup>
__device__ void WeighClusters(const Args& a, int head, int first, int end,
                              Tile<kDim, kGroup>& tile) {
  using T = Tile<kDim, kGroup>;
  const SummaryAttentionCudaParams& p = a.p;
  const int h = threadIdx.x / T::kClusters, c = first + threadIdx.x % T::kClusters;
  const int part = threadIdx.x % T::kClusters / T::kLanes, group = static_cast<int>(p.group);
  const int64_t cluster = head * p.table.clusters + c;
  const bool first_lane = threadIdx.x % T::kLanes == 0;
  float score = -INFINITY, left = 0, of_values = 0;
  int gone = 0;
  if (h < group && c < end) {
    const SummaryTable::Cluster of = p.table.of_cluster[cluster];
    gone = a.w.gone[cluster];
    left = of.rows - static_cast<float>(gone);
    of_values = of.rows * of.value_scale;
    if (left > 0 || gone > 0) {
      const float mean =
          p.scale * of.key_scale * DotInt8<kDim>(tile.q[h], p.table.keys + cluster * kDim);
      const float variance = of.spread * tile.norm[h];
      score = mean + variance / 2;
      if (gone > 0) {
        const int64_t at = (static_cast<int64_t>(head) * group + h) * p.table.clusters + c;
        score = fminf(ScoreOfRest(a, at, of.rows, gone, mean, variance), tile.bound[h]);
        a.w.scores[at] = score;
      }
      score = left > 0 ? fminf(score, tile.bound[h]) : -INFINITY;
    }
  }
  const float most = OverLanes<T::kLanes, true>(score);
  if (first_lane) tile.part[0][h][part] = most;
  __syncthreads();
  if (gone > 0 && h == 0) a.w.gone[cluster] = 0;  // every q head has read it
  float max = tile.max[h];
#pragma unroll
  for (int i = 0; i < T::kParts; ++i) max = fmaxf(max, tile.part[0][h][i]);
  const float e = score == -INFINITY ? 0.0f : __expf(score - max);
  tile.weight[h][threadIdx.x % T::kClusters] = e * of_values;
  const float sum = OverLanes<T::kLanes, false>(left * e);
  if (first_lane) tile.part[1][h][part] = sum;
  __syncthreads();
  if (threadIdx.x % T::kClusters == 0) {
    const float keep = tile.max[h] == -INFINITY ? 0.0f : __expf(tile.max[h] - max);
    float total = tile.total[h] * keep;
#pragma unroll
    for (int i = 0; i < T::kParts; ++i) total += tile.part[1][h][i];
    tile.keep[h] = keep;
    tile.total[h] = total;
    tile.max[h] = max;
  }
  __syncthreads();
}

// Grid: (splits, kv_heads).
template <int kDim, int kGroup>
__global__ void __launch_bounds__(kThreads) ClustersKernel(const Args a) {
  using T = Tile<kDim, kGroup>;
  constexpr int kSlices = kThreads / kDim;
  __shared__ __align__(16) T tile;
  __shared__ float slices[kSlices][kDim];
  WaitForEarlierLaunch();
  const SummaryAttentionCudaParams& p = a.p;
  const int head = blockIdx.y, group = static_cast<int>(p.group);
  const int dim = threadIdx.x % kDim, slice = threadIdx.x / kDim;
  if (threadIdx.x < kGroup) tile.max[threadIdx.x] = -INFINITY, tile.total[threadIdx.x] = 0;
  __syncthreads();
  LoadQueries(a, head, tile);
  __syncthreads();
  const int clusters = static_cast<int>(p.table.clusters);
  const int share =
      ((clusters + a.splits - 1) / a.splits + T::kClusters - 1) / T::kClusters * T::kClusters;
  const int begin = min(clusters, static_cast<int>(blockIdx.x) * share);
  const int end = min(clusters, begin + share);
  float out[kGroup] = {};
  for (int first = begin; first < end; first += T::kClusters) {
    WeighClusters(a, head, first, end, tile);
#pragma unroll
    for (int h = 0; h < kGroup; ++h) out[h] *= tile.keep[h];
    const int8_t* values = p.table.values + (head * p.table.clusters + first) * kDim + dim;
    const int n = min(T::kClusters, end - first);
#pragma unroll 8
    for (int c = slice; c < n; c += kSlices) {
      const float value = values[c * kDim];
#pragma unroll
      for (int h = 0; h < kGroup; ++h) out[h] += tile.weight[h][c] * value;
    }
    __syncthreads();
  }
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    if (h >= group) break;
    slices[slice][dim] = out[h];
    __syncthreads();
    const int64_t part = (static_cast<int64_t>(head) * group + h) * a.splits + blockIdx.x;
    if (slice == 0) {
      float sum = slices[0][dim];
      for (int i = 1; i < kSlices; ++i) sum += slices[i][dim];
      a.w.part_out[part * kDim + dim] = sum;
    }
    if (threadIdx.x == 0) a.w.part_state[part] = {tile.max[h], tile.total[h]};
    __syncthreads();
  }
}

// Grid: q heads.
template <int kDim>
__global__ void __launch_bounds__(kJoinThreads) JoinKernel(const Args a) {
  constexpr int kSlices = kJoinThreads / kDim, kChunk = kJoinThreads;
  __shared__ float part_weight[kMaxSplits], row_weight[kChunk], slices[kSlices][kDim];
  __shared__ int64_t row_at[kChunk];
  __shared__ float shared_centre[kJoinThreads / 32];
  WaitForEarlierLaunch();
  const SummaryAttentionCudaParams& p = a.p;
  const int group = static_cast<int>(p.group), head = blockIdx.x / group;
  const int64_t h = blockIdx.x;
  const int dim = threadIdx.x % kDim, slice = threadIdx.x / kDim;
  if (threadIdx.x == 0 && h % group == 0) a.w.least[head] = 0;
  const float2* states = a.w.part_state + h * a.splits;
  const float before = p.lse[h];  // read by all before one writes it
  float max = -INFINITY;
#pragma unroll 8
  for (int s = 0; s < a.splits; ++s) max = fmaxf(max, states[s].x);
  if (max == -INFINITY) return;  // nothing is left over
  float total = 0;
#pragma unroll 8
  for (int s = 0; s < a.splits; ++s) {
    const float weight = states[s].x == -INFINITY ? 0.0f : __expf(states[s].x - max);
    total += weight * states[s].y;
    if (threadIdx.x == 0) part_weight[s] = weight;
  }
  float of_centre = 0;
  if (threadIdx.x < kDim) {
    of_centre = p.table.centre[static_cast<int64_t>(head) * kDim + threadIdx.x] *
                __uint_as_float(static_cast<uint32_t>(p.q[h * kDim + threadIdx.x]) << 16);
  }
  of_centre = WarpSum(of_centre);
  if (threadIdx.x % 32 == 0) shared_centre[threadIdx.x / 32] = of_centre;
  __syncthreads();
  float sum = 0;
  for (int s = slice; s < a.splits; s += kSlices) {
    sum += part_weight[s] * a.w.part_out[(h * a.splits + s) * kDim + dim];
  }
  const int selected = SelectedOf(p, head);
  for (int first = 0; first < selected; first += kChunk) {
    const int n = min(kChunk, selected - first), j = first + static_cast<int>(threadIdx.x);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < n) {
      const float score = a.w.scores[h * p.table.clusters + ClusterOf(p, head, j)];
      row_weight[threadIdx.x] = score == -INFINITY ? 0.0f : __expf(score - max);
      row_at[threadIdx.x] = PlaceOf(p, head, j);
    }
    __syncthreads();
#pragma unroll 16
    for (int i = slice; i < n; i += kSlices) {
      const uint32_t bits = p.v[row_at[i] * kDim + dim];
      sum -= row_weight[i] * __uint_as_float(bits << 16);
    }
  }
  slices[slice][dim] = sum;
  __syncthreads();
  if (slice != 0) return;
  for (int s = 1; s < kSlices; ++s) sum += slices[s][dim];
  of_centre = 0;
  for (int w = 0; w < kDim / 32; ++w) of_centre += shared_centre[w];
  const float rest = p.scale * of_centre + max + logf(total);
  const float both = fmaxf(before, rest) + log1pf(__expf(-fabsf(before - rest)));
  float& out = p.out[h * kDim + dim];
  out = (before == -INFINITY ? 0.0f : __expf(before - both) * out) +
        __expf(rest - both) * sum / total;
  if (dim == 0) p.lse[h] = both;
}

int64_t Splits(int64_t clusters, int64_t kv_heads) {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    processors = 1;
  }
  const int64_t of_head = std::max<int64_t>(1, 4 * processors / kv_heads);
  return std::clamp<int64_t>((clusters + kSplitClusters - 1) / kSplitClusters, 1,
                             std::min<int64_t>(of_head, kMaxSplits));
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

Workspace Lay(int64_t kv_heads, int64_t group, int64_t head_dim, int64_t clusters, Carve& carve) {
  const int64_t q_heads = kv_heads * group, splits = Splits(clusters, kv_heads);
  Workspace w;
  w.least = carve.Next<unsigned>(kv_heads);
  w.gone = carve.Next<int>(kv_heads * clusters);
  w.sum = carve.Next<long long>(q_heads * clusters);
  w.squares = carve.Next<long long>(q_heads * clusters);
  w.scores = carve.Next<float>(q_heads * clusters);
  w.part_out = carve.Next<float>(q_heads * splits * head_dim);
  w.part_state = carve.Next<float2>(q_heads * splits);
  return w;
}

using Kernel = void (*)(Args);

template <int kDim, int kGroup>
cudaError_t LaunchAll(const Args& a, cudaStream_t stream) {
  bool early = false;
  if (const cudaError_t error = EarlyLaunchServed(&early); error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  const auto heads = static_cast<unsigned>(a.p.kv_heads);
  const auto rows =
      static_cast<unsigned>(std::clamp<int64_t>((a.p.selected + kWarps - 1) / kWarps, 1, 256));
  config.gridDim = dim3(rows, heads);
  Kernel kernel = SelectedRowsKernel<kDim, kGroup>;
  if (const cudaError_t error = cudaLaunchKernelEx(&config, kernel, a); error != cudaSuccess) {
    return error;
  }
  config.gridDim = dim3(static_cast<unsigned>(a.splits), heads);
  kernel = ClustersKernel<kDim, kGroup>;
  if (const cudaError_t error = cudaLaunchKernelEx(&config, kernel, a); error != cudaSuccess) {
    return error;
  }
  config.gridDim = dim3(static_cast<unsigned>(a.p.kv_heads * a.p.group));
  config.blockDim = dim3(kJoinThreads);
  kernel = JoinKernel<kDim>;
  return cudaLaunchKernelEx(&config, kernel, a);
}

template <int kDim>
cudaError_t LaunchForGroup(const Args& a, cudaStream_t stream) {
  if (a.p.group <= 4) return LaunchAll<kDim, 4>(a, stream);
  if (a.p.group <= 8) return LaunchAll<kDim, 8>(a, stream);
  return LaunchAll<kDim, kMaxGroup>(a, stream);
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
  a.splits = static_cast<int>(Splits(p.table.clusters, p.kv_heads));
  return p.head_dim == 64 ? LaunchForGroup<64>(a, stream) : LaunchForGroup<128>(a, stream);
}

}  // namespace carrel::kernels
