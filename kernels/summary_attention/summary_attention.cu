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
constexpr int kMaxGroup = 16;
constexpr int kMaxSplits = 64;
constexpr int kSplitClusters = 32;     // a block for fewer is not worth its partial sums
constexpr int kSharedHeads = 4;        // whose sums the warps of a block join at once
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
  float norm = 0;       // scale^2 |q|^2

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
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kShare; ++i) squares += q[h][i] * q[h][i];
      squares = WarpSum(squares);
      if (lane == h) norm = p.scale * p.scale * squares;
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

// What a warp saw of its clusters. Lane h: maximum and sum of exponentials of q head h.
template <int kDim, int kGroup>
struct WarpSums {
  static constexpr int kShare = kDim / 32;
  float max = -INFINITY, total = 0;
  float out[kGroup][kShare] = {};

  __device__ __forceinline__ void Add(float score, float left, float value_weight, int group,
                                      const float (&value)[kShare]) {
    const float now = fmaxf(max, score);
    const float before = max == -INFINITY ? 0.0f : __expf(max - now);
    const float e = score == -INFINITY ? 0.0f : __expf(score - now);
    max = now;
    total = total * before + left * e;
    const float weight = e * value_weight;
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      if (h >= group) break;
      const float w = __shfl_sync(~0u, weight, h), b = __shfl_sync(~0u, before, h);
#pragma unroll
      for (int i = 0; i < kShare; ++i) out[h][i] = out[h][i] * b + w * value[i];
    }
  }
};

// Joins the block's warps: its part of the sums.
template <int kDim, int kGroup>
__device__ void StorePart(const Args& a, const WarpSums<kDim, kGroup>& sums, int head, int group) {
  constexpr int kShare = kDim / 32, kHeads = kSharedHeads < kGroup ? kSharedHeads : kGroup;
  __shared__ float warp_out[kWarps][kHeads][kDim];
  __shared__ float warp_max[kWarps][kMaxGroup], warp_total[kWarps][kMaxGroup];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane < group) {
    warp_max[warp][lane] = sums.max;
    warp_total[warp][lane] = sums.total;
  }
#pragma unroll
  for (int first = 0; first < kGroup; first += kHeads) {
    if (first >= group) break;
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        if (first + h < kGroup) warp_out[warp][h][kShare * lane + i] = sums.out[first + h][i];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kHeads * kDim; i += kThreads) {
      const int h = i / kDim;
      if (first + h >= group) continue;
      float max = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) max = fmaxf(max, warp_max[w][first + h]);
      float total = 0, out = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (warp_max[w][first + h] == -INFINITY) continue;
        const float weight = __expf(warp_max[w][first + h] - max);
        total += weight * warp_total[w][first + h];
        out += weight * warp_out[w][h][i % kDim];
      }
      const int64_t part = (static_cast<int64_t>(head) * group + first + h) * a.splits + blockIdx.x;
      a.w.part_out[part * kDim + i % kDim] = out;
      if (i % kDim == 0) a.w.part_state[part] = {max, total};
    }
  }
}

// Grid: (splits, kv_heads); a warp per cluster.
template <int kDim, int kGroup>
__global__ void __launch_bounds__(kThreads) ClustersKernel(const Args a) {
  constexpr int kShare = kDim / 32;
  WaitForEarlierLaunch();
  const SummaryAttentionCudaParams& p = a.p;
  const int head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Queries<kDim, kGroup> queries(p, head);
  const int group = queries.group;
  const int64_t q_head = static_cast<int64_t>(head) * group + lane;
  float bound = INFINITY;
  if (p.base != nullptr && lane < group) {
    const unsigned least = a.w.least[head];
    if (least != 0) bound = FromOrdered(~least) + p.base[q_head] - queries.of_centre;
  }
  const int clusters = static_cast<int>(p.table.clusters);
  const int share = (clusters + a.splits - 1) / a.splits;
  const int begin = blockIdx.x * share, end = min(clusters, begin + share);
  WarpSums<kDim, kGroup> sums;
  for (int c = begin + warp; c < end; c += kWarps) {
    const int64_t cluster = head * p.table.clusters + c;
    const SummaryTable::Cluster of = p.table.of_cluster[cluster];
    const int gone = a.w.gone[cluster];
    if (of.rows == 0 && gone == 0) continue;
    float mean[kShare], value[kShare];
    LoadInt8<kDim>(p.table.keys + cluster * kDim, mean);
    LoadInt8<kDim>(p.table.values + cluster * kDim, value);
    const float of_mean = p.scale * of.key_scale * queries.Dot(mean);
    const float variance = of.spread * queries.norm;
    float score = of_mean + variance / 2;
    if (gone > 0) {
      const int64_t at = q_head * clusters + c;
      if (lane < group) {
        score = fminf(ScoreOfRest(a, at, of.rows, gone, of_mean, variance), bound);
        a.w.scores[at] = score;
      }
      __syncwarp();
      if (lane == 0) a.w.gone[cluster] = 0;
    }
    const float left = of.rows - static_cast<float>(gone);
    if (left <= 0) continue;
    sums.Add(fminf(score, bound), left, of.rows * of.value_scale, group, value);
  }
  StorePart<kDim, kGroup>(a, sums, head, group);
}

// Grid: q heads.
template <int kDim>
__global__ void __launch_bounds__(kThreads) JoinKernel(const Args a) {
  constexpr int kSlices = kThreads / kDim, kChunk = kThreads;
  __shared__ float part_weight[kMaxSplits], row_weight[kChunk], slices[kSlices][kDim];
  __shared__ int64_t row_at[kChunk];
  __shared__ float shared_centre[kWarps];
  WaitForEarlierLaunch();
  const SummaryAttentionCudaParams& p = a.p;
  const int group = static_cast<int>(p.group), head = blockIdx.x / group;
  const int64_t h = blockIdx.x;
  const int dim = threadIdx.x % kDim, slice = threadIdx.x / kDim;
  if (threadIdx.x == 0 && h % group == 0) a.w.least[head] = 0;
  const float2* states = a.w.part_state + h * a.splits;
  const float before = p.lse[h];  // read by all before one writes it
  float max = -INFINITY;
  for (int s = 0; s < a.splits; ++s) max = fmaxf(max, states[s].x);
  if (max == -INFINITY) return;  // nothing is left over
  float total = 0;
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
#pragma unroll 8
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
  const int64_t of_head = std::max<int64_t>(1, 2 * processors / kv_heads);
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
  const auto rows = static_cast<unsigned>(
      std::clamp<int64_t>((a.p.selected + 2 * kWarps - 1) / (2 * kWarps), 1, 128));
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
