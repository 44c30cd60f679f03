// Q is A of the tensor cores, keys are B, as in dot_score. A KV head's blocks are a cluster: sums
// of exponentials, histograms and, last, each block's part of the attention are read where the
// other blocks keep them in shared memory.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/decode_attention-inl.cuh"
#include "kernels/launch-inl.cuh"
#include "kernels/mma-inl.cuh"
#include "kernels/select-inl.cuh"
#include "kernels/select/rescore_rows/rescore_rows.h"
#include "kernels/softmax_state-inl.cuh"
#include "kernels/together-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 16;   // candidates of a product
constexpr int kChunk = 32;  // of a warp's step
constexpr int kMaxGroup = 16;
constexpr int kMaxBlocks = 8;    // of a cluster: what every device with clusters serves
constexpr int kBlockRows = 256;  // a block for fewer is not worth its barriers
constexpr int kBins = 2048;
constexpr float kLeast = -32.0f;  // scores are log-probabilities: at most 0
constexpr int kPad = 8;           // between the scores of two q heads: other banks
constexpr float kLog2E = 1.44269504f;

struct Args {
  RescoreRowsParams p;
  int share;  // candidates of a block, a multiple of kTile
  int count, wanted;
};

// A block's candidates, in dynamic shared memory.
struct Candidates {
  float* scores;     // [group, share + kPad]
  int* rows;         // [share]
  uint16_t* keys;    // [share]: they rise with the group's score
  uint16_t* places;  // [share]: of those that are chosen
  int stride;

  __host__ __device__ static int64_t BytesOf(int64_t group, int64_t share) {
    return 4 * group * (share + kPad) + 8 * share;
  }
  __device__ Candidates(float* at, int group, int share)
      : scores(at),
        rows(reinterpret_cast<int*>(at + group * (share + kPad))),
        keys(reinterpret_cast<uint16_t*>(rows + share)),
        places(keys + share),
        stride(share + kPad) {}
};

// In each block's shared memory, read by its cluster.
struct Exchange {
  float4 sums[kMaxGroup * 32];     // [group, head_dim]: its part of the attention
  SoftmaxState states[kMaxGroup];  // of the candidates, then of what is attended to
  unsigned suffix[kBins + 1];      // suffix sums of the block's histogram
};

__device__ __forceinline__ void ClusterBarrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();  // one block
#endif
}

// *local of the block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T ReadOfBlock(const T* local, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  static_assert(sizeof(T) == 4);
  unsigned at, bits;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(at)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(local))), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits) : "r"(at) : "memory");
  T value;
  memcpy(&value, &bits, sizeof(T));
  return value;
#else
  return *local;
#endif
}

// The states of a q head in all blocks, one in each of eight lanes; of blocks that are not there,
// none.
__device__ __forceinline__ SoftmaxState StateOfBlock(const Exchange& exchange, int h, int block,
                                                     int blocks) {
  if (block >= blocks) return {-INFINITY, 0};
  return {ReadOfBlock(&exchange.states[h].max, static_cast<unsigned>(block)),
          ReadOfBlock(&exchange.states[h].sum, static_cast<unsigned>(block))};
}

// Over kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ SoftmaxState JoinLanes(SoftmaxState state) {
#pragma unroll
  for (int m = 1; m < kLanes; m *= 2) {
    state = Join(state, {__shfl_xor_sync(~0u, state.max, m), __shfl_xor_sync(~0u, state.sum, m)});
  }
  return state;
}

// What is not there is -inf.
template <int kCount>
__device__ __forceinline__ void AddScores(SoftmaxState& state, const float (&x)[kCount]) {
  float max = state.max;
#pragma unroll
  for (int i = 0; i < kCount; ++i) max = fmaxf(max, x[i]);
  if (max == -INFINITY) return;
  state.sum *= __expf(state.max - max);
#pragma unroll
  for (int i = 0; i < kCount; ++i) state.sum += __expf(x[i] - max);
  state.max = max;
}

// Exact scores of this block's candidates [begin, end), and their softmax states per warp and q
// head. A warp takes kChunk neighbours at a time.
template <int kDim, bool kWide>
class Scorer {
  static constexpr int kLoads = kDim / 32, kShare = kWide ? 2 : 1;
  static constexpr int kTiles = kWide ? 1 : 2;  // whose keys travel together
  static_assert(kChunk == 2 * kTile);

 public:
  __device__ Scorer(const Args& a, int head, int begin, int end)
      : begin_(begin),
        end_(end),
        lane_(threadIdx.x % 32),
        first_(begin + static_cast<int>(threadIdx.x) / 32 * kChunk),
        g_(lane_ / 4),
        t_(lane_ % 4),
        group_(static_cast<int>(a.p.group)),
        scale_(a.p.scale),
        ids_(a.p.candidates + head * a.p.candidate_stride),
        k_(a.p.kv.k + head * a.p.kv.row_stride * kDim) {
    const uint16_t* q = a.p.q + static_cast<int64_t>(head) * group_ * kDim + 8 * t_;
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
      state_[s] = {-INFINITY, 0};
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        q_[s][j] = g_ + 8 * s < group_ ? LoadStream16(q + (g_ + 8 * s) * kDim + 32 * j)
                                       : uint4{0, 0, 0, 0};
      }
    }
  }

  __device__ void Score(const Candidates& to, SoftmaxState (*of_warps)[kMaxGroup]) {
    int next = first_ < end_ ? Find(first_) : 0;
    for (int at = first_; at < end_; at += kWarps * kChunk) {
      const int row = next;
      if (at + lane_ < end_) to.rows[at + lane_ - begin_] = row;
#pragma unroll
      for (int tile = 0; tile < kChunk / kTile; tile += kTiles) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) Load(tile + i, row, keys_[i]);
        if (tile == 0 && at + kWarps * kChunk < end_) next = Find(at + kWarps * kChunk);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          ScoreTile(at + (tile + i) * kTile, keys_[i], to.scores, to.stride);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
      state_[s] = JoinLanes<4>(state_[s]);
      if (t_ == 0 && g_ + 8 * s < group_) {
        of_warps[threadIdx.x / 32][g_ + 8 * s] = state_[s];
      }
    }
  }

 private:
  // The row of this lane's candidate, beyond the end the last one's.
  __device__ int Find(int at) const { return __ldg(ids_ + min(at + lane_, end_ - 1)); }

  // Keys g and 8 + g of a tile of the chunk, whose rows the lanes know.
  __device__ void Load(int tile, int row, uint4 (&keys)[2][kLoads]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_lane = __shfl_sync(~0u, row, tile * kTile + 8 * i + g_);
      const uint16_t* key = k_ + static_cast<int64_t>(of_lane) * kDim + 8 * t_;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) keys[i][j] = LoadStream16(key + 32 * j);
    }
  }

  __device__ void ScoreTile(int tile, const uint4 (&keys)[2][kLoads], float* scores, int stride) {
    float c[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        MmaPair(c[i], q_[0][j], kWide ? q_[kShare - 1][j] : uint4{0, 0, 0, 0}, keys[i][j]);
      }
    }
#pragma unroll
    for (int s = 0; s < kShare; ++s) {
      if (g_ + 8 * s >= group_) continue;
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int candidate = tile + i / 2 * 8 + 2 * t_ + i % 2;
        const bool there = candidate < end_;
        x[i] = there ? scale_ * c[i / 2][2 * s + i % 2] : -INFINITY;
        if (there) scores[(g_ + 8 * s) * stride + candidate - begin_] = x[i];
      }
      AddScores(state_[s], x);
    }
  }

  const int begin_, end_, lane_, first_, g_, t_, group_;
  const float scale_;
  const int32_t* ids_;
  const uint16_t* k_;
  uint4 q_[kShare][kLoads], keys_[kTiles][2][kLoads];
  SoftmaxState state_[kShare];
};

// Joins the warps' states, then the cluster's: base [group]. Synchronises.
__device__ void SumOverCluster(const SoftmaxState (*of_warps)[kMaxGroup], int group, int blocks,
                               Exchange& exchange, float* base) {
  static_assert(kThreads >= kMaxGroup * kWarps && kWarps == 16 && kMaxBlocks == 8);
  __syncthreads();
  if (threadIdx.x < kMaxGroup * kWarps) {
    const int h = static_cast<int>(threadIdx.x) / kWarps,
              w = static_cast<int>(threadIdx.x) % kWarps;
    const SoftmaxState state =
        JoinLanes<kWarps>(h < group ? of_warps[w][h] : SoftmaxState{-INFINITY, 0});
    if (w == 0) exchange.states[h] = state;
  }
  ClusterBarrier();
  if (threadIdx.x < kMaxGroup * kMaxBlocks) {
    const int h = static_cast<int>(threadIdx.x) / kMaxBlocks;
    const int b = static_cast<int>(threadIdx.x) % kMaxBlocks;
    const SoftmaxState state = JoinLanes<kMaxBlocks>(StateOfBlock(exchange, h, b, blocks));
    if (b == 0 && h < group) base[h] = state.max + logf(state.sum);
  }
  __syncthreads();
}

// Keys in 0 .. kBins - 1, and how many there are of each.
__device__ void MakeKeys(const Candidates& candidates, int group, int rows, const float* base,
                         unsigned* counts) {
  for (int i = threadIdx.x; i < rows; i += kThreads) {
    float best = -INFINITY;
    for (int h = 0; h < group; ++h) {
      best = fmaxf(best, candidates.scores[h * candidates.stride + i] - base[h]);
    }
    const int key = min(max(__float2int_rd((best - kLeast) * (kBins / -kLeast)), 0), kBins - 1);
    candidates.keys[i] = static_cast<uint16_t>(key);
    atomicAdd(&counts[key], 1u);
  }
  __syncthreads();
}

// FindThreshold of select-inl.cuh, by a cluster. own: this block's histogram, becomes its suffix
// sums. Passes one ClusterBarrier.
__device__ Threshold FindClusterThreshold(unsigned* own, unsigned k, int block, int blocks) {
  SuffixSums<kThreads>(own, kBins);
  ClusterBarrier();
  return SearchColumns<kThreads>(
      [&](int b, int t) { return ReadOfBlock(own + t, static_cast<unsigned>(b)); }, kBins, k, block,
      blocks);
}

// Ids of the chosen, and their places among the block's candidates. Returns how many are this
// block's. Synchronises.
__device__ int Choose(const Args& a, int head, int rows, unsigned wanted,
                      const Candidates& candidates, const Threshold& t, const unsigned* suffix) {
  __shared__ unsigned of_warps[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned lanes_before = (1u << lane) - 1;
  const unsigned own_above = suffix[t.digit + 1], own_equal = suffix[t.digit] - own_above;
  const unsigned equal_first = t.above + t.equal_before;
  int32_t* ids = a.p.ids + head * a.p.wanted;
  if (threadIdx.x < 32) of_warps[threadIdx.x] = 0;
  unsigned before = 0;  // of both kinds, the equal in the upper half
  for (int first = 0; first < rows; first += kThreads) {
    const int j = first + static_cast<int>(threadIdx.x);
    const unsigned key = j < rows ? candidates.keys[j] : 0;
    const bool above = j < rows && key > t.digit, equal = j < rows && key == t.digit;
    const unsigned all_above = __ballot_sync(~0u, above), all_equal = __ballot_sync(~0u, equal);
    __syncthreads();
    if (lane == 0) of_warps[warp] = __popc(all_above) | __popc(all_equal) << 16;
    __syncthreads();
    const unsigned ranks = before + SumBeforeWarp(of_warps);
    before += __reduce_add_sync(~0u, of_warps[lane]);
    if (!above && !equal) continue;
    const unsigned rank = above ? (ranks & 0xffff) + __popc(all_above & lanes_before)
                                : (ranks >> 16) + __popc(all_equal & lanes_before);
    const unsigned at = (above ? t.above_before : equal_first) + rank;
    if (at >= wanted) continue;
    ids[at] = candidates.rows[j];
    candidates.places[(above ? 0 : own_above) + rank] = static_cast<uint16_t>(j);
  }
  __syncthreads();
  return static_cast<int>(own_above + min(own_equal, wanted - min(wanted, equal_first)));
}

// Attention over this block's chosen candidates: exchange.states and .sums. Their scores, and
// whatever else is in dynamic shared memory, are gone after it. Synchronises.
template <int kDim, bool kWide>
__device__ void AttendChosen(const Args& a, int head, int chosen, const Candidates& candidates,
                             float* shared, Exchange& exchange) {
  using Values = ValueWarp<kDim, kWide>;
  constexpr int kHeads = Values::kHeads;
  __shared__ float warp_max[kWarps][kHeads], warp_sum[kWarps][kHeads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int group = static_cast<int>(a.p.group);
  {
    Values values(a.p.kv.v + head * a.p.kv.row_stride * kDim);
    for (int tile = warp * kTile; tile < chosen; tile += kWarps * kTile) {
      int rows[4], places[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        places[i] = candidates.places[min(tile + i / 2 * 8 + 2 * t + i % 2, chosen - 1)];
        rows[i] = candidates.rows[places[i]];
      }
      values.LoadV(rows);
      float score[2][4] = {};
#pragma unroll
      for (int s = 0; s < Values::kShare; ++s) {
        if (g + 8 * s >= group) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          score[i / 2][2 * s + i % 2] =
              candidates.scores[(g + 8 * s) * candidates.stride + places[i]];
        }
      }
      values.Add(score, chosen - tile, kLog2E);
    }
    values.SumWeights();
    __syncthreads();  // nobody reads candidates any more
    values.Store(group, warp_max[warp], warp_sum[warp], shared + warp * kHeads * kDim);
  }
  JoinWarps<kDim, kWarps, kHeads>(warp_max, warp_sum, shared, group, kLog2E,
                                  [&](int i, const float4& sum, float max, float total) {
                                    exchange.sums[i] = sum;
                                    if (i % (kDim / 4) != 0) return;
                                    exchange.states[i / (kDim / 4)] = {max, total};
                                  });
}

// The blocks' parts become out and lse, each block's share of them. weights: shared, [group,
// kMaxBlocks].
template <int kDim>
__device__ void JoinBlocks(const Args& a, int head, int block, int blocks, const Exchange& exchange,
                           float* weights) {
  const int group = static_cast<int>(a.p.group), b = threadIdx.x % kMaxBlocks;
  if (threadIdx.x < kMaxGroup * kMaxBlocks) {
    const int h = static_cast<int>(threadIdx.x) / kMaxBlocks;
    const SoftmaxState own =
        h < group ? StateOfBlock(exchange, h, b, blocks) : SoftmaxState{-INFINITY, 0};
    const SoftmaxState all = JoinLanes<kMaxBlocks>(own);
    weights[threadIdx.x] = all.sum > 0 ? __expf(own.max - all.max) / all.sum : 0.0f;
    if (block == 0 && b == 0 && h < group) {
      a.p.lse[head * group + h] = all.sum > 0 ? all.max + logf(all.sum) : -INFINITY;
    }
  }
  __syncthreads();
  // Eight lanes an element, each with a block's.
  const int elements = group * kDim;
  const int share = (elements + blocks - 1) / blocks, last = min(elements, (block + 1) * share);
  constexpr int kAtOnce = kThreads / kMaxBlocks;
  for (int first = block * share; first < last; first += kAtOnce) {
    const int i = first + static_cast<int>(threadIdx.x) / kMaxBlocks;
    const bool there = i < last && b < blocks;
    float x = there ? weights[i / kDim * kMaxBlocks + b] *
                          ReadOfBlock(reinterpret_cast<const float*>(exchange.sums) + i,
                                      static_cast<unsigned>(b))
                    : 0.0f;
#pragma unroll
    for (int m = 1; m < kMaxBlocks; m *= 2) x += __shfl_xor_sync(~0u, x, m);
    if (b == 0 && i < last) a.p.out[static_cast<int64_t>(head) * elements + i] = x;
  }
}

// Grid: (blocks, kv_heads, sequences), clusters of `blocks`.
template <int kDim, bool kWide>
__global__ void __launch_bounds__(kThreads, 1)
    RescoreRowsKernel(const __grid_constant__ Together<Args> all) {
  const Args& a = all.own();
  extern __shared__ __align__(16) float dynamic[];  // candidates; then what the warps attended
  __shared__ __align__(16) Exchange exchange;
  __shared__ SoftmaxState of_warps[kWarps][kMaxGroup];
  __shared__ float base[kMaxGroup], weights[kMaxGroup * kMaxBlocks];
  AllowNextLaunch();
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  const int group = static_cast<int>(a.p.group);
  const int begin = min(a.count, block * a.share), end = min(a.count, begin + a.share);
  const Candidates candidates(dynamic, group, a.share);
  for (int t = threadIdx.x; t <= kBins; t += kThreads) exchange.suffix[t] = 0;
  WaitForEarlierLaunch();
  {
    Scorer<kDim, kWide> scorer(a, head, begin, end);
    scorer.Score(candidates, of_warps);
  }
  SumOverCluster(of_warps, group, blocks, exchange, base);
  if (a.p.base != nullptr && block == 0 && threadIdx.x < group) {
    a.p.base[head * group + threadIdx.x] = base[threadIdx.x];
  }
  MakeKeys(candidates, group, end - begin, base, exchange.suffix);
  const auto wanted = static_cast<unsigned>(
      a.p.wanted_of_head == nullptr ? a.wanted : min(a.p.wanted_of_head[head], a.wanted));
  const Threshold t = FindClusterThreshold(exchange.suffix, wanted, block, blocks);
  const int chosen = Choose(a, head, end - begin, wanted, candidates, t, exchange.suffix);
  if (a.p.out != nullptr) {
    AttendChosen<kDim, kWide>(a, head, chosen, candidates, dynamic, exchange);
    ClusterBarrier();
    JoinBlocks<kDim>(a, head, block, blocks, exchange, weights);
  }
  ClusterBarrier();  // nobody reads this block's shared memory any more
}

bool ClustersServed() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 9;
}

// Of a block, beside what it has statically.
int64_t DynamicBytes() {
  constexpr int64_t kStatic =
      sizeof(Exchange) + sizeof(SoftmaxState) * kWarps * kMaxGroup + 8 * kWarps * kMaxGroup + 8192;
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return 0;
  }
  return std::max<int64_t>(0, bytes - kStatic);
}

int64_t MostShare(int64_t group) {
  const int64_t most = (DynamicBytes() - Candidates::BytesOf(group, 0)) / (4 * group + 8);
  return std::clamp<int64_t>(most, 0, 65535) / kTile * kTile;
}

bool Served(const RescoreRowsParams& p) {
  return p.kv_heads >= 1 && p.kv_heads <= 65535 && p.group >= 1 && p.group <= kMaxGroup &&
         p.count >= 0 && p.count <= p.candidate_stride && p.wanted >= 0 &&
         (p.head_dim == 64 || p.head_dim == 128) && p.scale > 0 &&
         p.count <= MostRescoredRows(p.group);
}

// Of a KV head.
int64_t BlocksOf(const RescoreRowsParams& p) {
  int64_t blocks = 1;
  while (ClustersServed() && blocks < kMaxBlocks &&
         (blocks * kBlockRows < p.count || blocks * MostShare(p.group) < p.count)) {
    blocks *= 2;
  }
  return blocks;
}

bool Alike(const RescoreRowsParams& a, const RescoreRowsParams& b) {
  return a.kv_heads == b.kv_heads && a.group == b.group && a.head_dim == b.head_dim &&
         BlocksOf(a) == BlocksOf(b);
}

Args ArgsOf(const RescoreRowsParams& p) {
  const int64_t blocks = BlocksOf(p);
  Args a;
  a.p = p;
  a.count = static_cast<int>(p.count);
  a.wanted = static_cast<int>(std::min(p.wanted, p.count));
  a.share = static_cast<int>(((p.count + blocks - 1) / blocks + kTile - 1) / kTile * kTile);
  return a;
}

int64_t SharedBytes(const Args& a) {
  const RescoreRowsParams& p = a.p;
  const int64_t attended = p.out == nullptr ? 0 : kWarps * (p.group > 8 ? 16 : 8) * p.head_dim * 4;
  return std::max(Candidates::BytesOf(p.group, a.share), attended);
}

auto KernelFor(const RescoreRowsParams& p) {
  return p.head_dim == 64
             ? (p.group > 8 ? RescoreRowsKernel<64, true> : RescoreRowsKernel<64, false>)
             : (p.group > 8 ? RescoreRowsKernel<128, true> : RescoreRowsKernel<128, false>);
}

// Of params that are alike.
cudaError_t Launch(std::span<const RescoreRowsParams> some, cudaStream_t stream) {
  const RescoreRowsParams& p = some[0];
  int64_t shared = 0;
  for (const RescoreRowsParams& each : some) shared = std::max(shared, SharedBytes(ArgsOf(each)));
  const auto kernel = KernelFor(p);
  RETURN_IF_FAILED(AllowShared(kernel, shared));
  const int64_t blocks = BlocksOf(p);
  return kernels::Launch({.grid = GridOf(blocks, p.kv_heads, static_cast<int64_t>(some.size())),
                          .threads = kThreads,
                          .shared_bytes = shared,
                          .early = true,
                          .cluster = static_cast<unsigned>(blocks)},
                         stream, kernel, TogetherOf(some, ArgsOf));
}

}  // namespace

int64_t MostRescoredRows(int64_t group) {
  return MostShare(group) * (ClustersServed() ? kMaxBlocks : 1);
}

cudaError_t RescoreRows(std::span<const RescoreRowsParams> all, cudaStream_t stream) {
  std::vector<RescoreRowsParams> wanted;
  for (const RescoreRowsParams& p : all) {
    if (!Served(p)) return cudaErrorInvalidValue;
    if (p.count > 0 && p.wanted > 0) wanted.push_back(p);
  }
  return ForStretches(
      std::span<const RescoreRowsParams>(wanted), Alike,
      [&](std::span<const RescoreRowsParams> some) { return Launch(some, stream); });
}

}  // namespace carrel::kernels
