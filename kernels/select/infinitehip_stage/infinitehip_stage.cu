// A warp takes four chunks through their descents at once: the two keys that each compares are the
// eight columns of one tensor-core product.
#include <algorithm>

#include "kernels/block_select-inl.cuh"
#include "kernels/group_max-inl.cuh"
#include "kernels/launch-inl.cuh"
#include "kernels/select/infinitehip_stage/infinitehip_stage.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpChunks = 4;
constexpr int kBlockChunks = kThreads / 32 * kWarpChunks;
constexpr int kSharedKeys = 4096;

using Range = InfiniteHipRange;

struct Args {
  InfiniteHipStageParams p;
  unsigned* finished;  // [kv_heads]
  unsigned* keys;      // [kv_heads, places]
  // Every range has as many places for chunks as the longest needs.
  int range_places, places;
};

// The chunk at a place; empty if there is none.
__device__ Range ChunkAt(const Args& a, int head, int place) {
  const int r = place / a.range_places, piece = place % a.range_places;
  const int chunk = static_cast<int>(a.p.chunk);
  Range whole{0, static_cast<int>(a.p.rows)};
  if (a.p.in != nullptr) {
    if (r >= a.p.in_count[head]) return {0, 0};
    whole = a.p.in[head * a.p.in_stride + r];
  }
  const int begin = whole.begin + piece * chunk;
  return {begin, max(begin, min(whole.end, begin + chunk))};
}

// The score of the chunk's representative; chunks of the warp that are empty give what row 0
// scores. A lane looks after the chunk of its t = lane % 4; all lanes of one t do the same.
template <int kDim, bool kWide>
__device__ float Descend(const GroupQueries<kDim, kWide>& q, const uint16_t* k, Range chunk) {
  const int g = threadIdx.x % 32 / 4;
  float score = 0;
  for (bool first = true; __any_sync(~0u, first || chunk.end - chunk.begin > 1); first = false) {
    const int middle = (chunk.begin + chunk.end) / 2;
    const int left = (chunk.begin + middle) / 2, right = (middle + chunk.end) / 2;
    // Column g is the left (even g) or right key of chunk g / 2.
    const int left_of = __shfl_sync(~0u, left, g / 2), right_of = __shfl_sync(~0u, right, g / 2);
    float best[2];
    q.BestProducts(k + static_cast<int64_t>(g % 2 == 0 ? left_of : right_of) * kDim, best);
    if (chunk.end - chunk.begin > 1) {
      const bool go_right = best[1] > best[0];
      score = go_right ? best[1] : best[0];
      (go_right ? chunk.begin : chunk.end) = middle;
    } else if (first) {
      score = best[0];  // both keys are the only one
    }
  }
  return score;
}

// ids become the rows of ranges[0 .. count), in order. All threads; returns how many.
__device__ int ListRows(const Range* ranges, int count, int32_t* ids, uint64_t* warp_total) {
  const int share = (count + kThreads - 1) / kThreads;
  const int first = min(count, static_cast<int>(threadIdx.x) * share);
  const int last = min(count, first + share);
  uint64_t own = 0, total = 0;
  for (int i = first; i < last; ++i) own += static_cast<uint64_t>(ranges[i].end - ranges[i].begin);
  int64_t at = static_cast<int64_t>(SumOfThreadsBefore<kThreads>(own, warp_total, total));
  for (int i = first; i < last; ++i) {
    for (int row = ranges[i].begin; row < ranges[i].end; ++row) ids[at++] = row;
  }
  return static_cast<int>(total);
}

// Grid: (blocks of kBlockChunks chunks, kv_heads).
template <int kDim, bool kWide>
__global__ void __launch_bounds__(kThreads, 4) InfiniteHipStageKernel(const Args a) {
  __shared__ BlockSelectScratch<kThreads> scratch;
  __shared__ unsigned shared_keys[kSharedKeys];
  __shared__ bool last;
  const int head = blockIdx.y, lane = threadIdx.x % 32;
  const int place = static_cast<int>(blockIdx.x) * kBlockChunks +
                    static_cast<int>(threadIdx.x) / 32 * kWarpChunks + lane % 4;
  unsigned* keys = a.keys + static_cast<int64_t>(head) * a.places;
  const Range chunk = place < a.places ? ChunkAt(a, head, place) : Range{0, 0};
  const bool there = chunk.begin < chunk.end;
  if (__any_sync(~0u, there)) {
    const GroupQueries<kDim, kWide> q(a.p.q + head * a.p.group * kDim, static_cast<int>(a.p.group));
    const float score =
        Descend(q, a.p.kv.k + head * a.p.kv.row_stride * kDim, there ? chunk : Range{0, 0});
    if (lane < kWarpChunks && place < a.places) __stcg(keys + place, there ? KeyOf(score) : 0u);
  } else if (lane < kWarpChunks && place < a.places) {
    __stcg(keys + place, 0u);
  }

  // Whoever sees that all other blocks have written chooses.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&a.finished[head], 1u) == gridDim.x - 1;
    if (last) a.finished[head] = 0;  // for the next call
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  Range* out = a.p.out + head * a.p.out_stride;
  int count = 0;
  uint64_t own = 0, rows = 0;
  const int in_count = a.p.in == nullptr ? 1 : a.p.in_count[head];
  const Range* in = a.p.in == nullptr ? nullptr : a.p.in + head * a.p.in_stride;
  for (int i = threadIdx.x; in != nullptr && i < in_count; i += kThreads) {
    own += static_cast<uint64_t>(in[i].end - in[i].begin);
  }
  SumOfThreadsBefore<kThreads>(own, scratch.warp_total, rows);
  if (in == nullptr) rows = static_cast<uint64_t>(a.p.rows);
  if (rows <= static_cast<uint64_t>(a.p.wanted)) {
    count = in_count;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      out[i] = in == nullptr ? Range{0, static_cast<int>(a.p.rows)} : in[i];
    }
  } else {
    const bool fits = a.places <= kSharedKeys;
    for (int i = threadIdx.x; fits && i < a.places; i += kThreads) {
      shared_keys[i] = __ldcg(keys + i);
    }
    __syncthreads();
    // The places first: where their chunks lie is a chain of loads, better begun for all at once.
    count = SelectInBlock<kThreads>(
        a.places, static_cast<int>(a.p.wanted / a.p.chunk),
        [&](int j) { return fits ? shared_keys[j] : __ldcg(keys + j); }, scratch,
        [&](int rank, int j) { out[rank].begin = j; });
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) out[i] = ChunkAt(a, head, out[i].begin);
  }
  __syncthreads();
  if (threadIdx.x == 0) a.p.out_count[head] = count;
  if (a.p.ids == nullptr) return;
  const int listed = ListRows(out, count, a.p.ids + head * a.p.ids_stride, scratch.warp_total);
  if (threadIdx.x == 0) a.p.row_count[head] = listed;
}

int64_t RangePlaces(const InfiniteHipStageParams& p) {
  const int64_t longest = p.in == nullptr ? p.rows : p.in_rows;
  return (longest + p.chunk - 1) / p.chunk;
}

int64_t Places(const InfiniteHipStageParams& p) {
  return RangePlaces(p) * (p.in == nullptr ? 1 : p.in_stride);
}

size_t CounterBytes(int64_t kv_heads) {
  return (static_cast<size_t>(kv_heads) * sizeof(unsigned) + 255) / 256 * 256;
}

}  // namespace

int64_t InfiniteHipMostRanges(const InfiniteHipStageParams& p) {
  // All of a stage's ranges may go on as they are, if they hold few enough rows.
  const int64_t as_they_are = p.in == nullptr ? 1 : p.in_stride;
  return std::max(as_they_are, std::min(Places(p), p.wanted / p.chunk));
}

size_t InfiniteHipStageWorkspaceBytes(const InfiniteHipStageParams& p) {
  return CounterBytes(p.kv_heads) + static_cast<size_t>(p.kv_heads * Places(p)) * sizeof(unsigned);
}

cudaError_t InfiniteHipStage(const InfiniteHipStageParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > 16 || p.rows < 0 ||
      p.rows >= 1 << 30 || p.rows > p.kv.row_stride || (p.head_dim != 64 && p.head_dim != 128) ||
      p.chunk < 1 || p.wanted < p.chunk ||
      (p.in != nullptr && (p.in_stride < 1 || p.in_rows < 1))) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  if (p.workspace == nullptr || p.out_stride < InfiniteHipMostRanges(p) || Places(p) >= 1 << 30 ||
      (p.ids != nullptr && p.ids_stride < std::min(p.wanted, p.rows))) {
    return cudaErrorInvalidValue;
  }
  Args a;
  a.p = p;
  a.range_places = static_cast<int>(RangePlaces(p));
  a.places = static_cast<int>(Places(p));
  auto* bytes = static_cast<uint8_t*>(p.workspace);
  a.finished = reinterpret_cast<unsigned*>(bytes);
  a.keys = reinterpret_cast<unsigned*>(bytes + CounterBytes(p.kv_heads));
  const bool wide = p.group > 8;
  const auto kernel =
      p.head_dim == 64
          ? (wide ? InfiniteHipStageKernel<64, true> : InfiniteHipStageKernel<64, false>)
          : (wide ? InfiniteHipStageKernel<128, true> : InfiniteHipStageKernel<128, false>);
  return Launch({.grid = GridOf((a.places + kBlockChunks - 1) / kBlockChunks, p.kv_heads),
                 .threads = kThreads},
                stream, kernel, a);
}

}  // namespace carrel::kernels
