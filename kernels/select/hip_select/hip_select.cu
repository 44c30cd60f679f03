// The blocks of a KV head share the scoring of a round; then each of them chooses by itself among
// all branches, so that all know the next round's and one barrier per round is enough.
#include <algorithm>

#include "kernels/block_select-inl.cuh"
#include "kernels/group_max-inl.cuh"
#include "kernels/score_select-inl.cuh"
#include "kernels/select/hip_select/hip_select.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 8;  // keys of a warp at a time

struct Args {
  HipSelectParams p;
  RowSync* sync;     // [kv_heads]
  unsigned* scores;  // [kv_heads, 2 (rounds take turns), 2 * wanted]
  int wanted;        // branches kept
};

// Branches are ranges of blocks of keys. A round sees two for each that was kept: places 2i and
// 2i + 1 are the halves of kept[i]; the first half of a single block is empty.
__device__ int2 BranchAt(const int2* kept, int place) {
  const int2 whole = kept[place / 2];
  const int middle = (whole.x + whole.y) / 2;
  return place % 2 == 0 ? make_int2(whole.x, middle) : make_int2(middle, whole.y);
}

// The i-th key of the block that stands for a branch; -1 if there is none.
__device__ int RepresentativeRow(const int2* kept, int place, int i, const Args& a) {
  const int2 branch = BranchAt(kept, place);
  const int row = (branch.x + branch.y) / 2 * static_cast<int>(a.p.block_k) + i;
  return branch.x < branch.y && row < a.p.rows ? row : -1;
}

// scores[place] for places first .. last - 1, 0 where there is no branch. All threads;
// synchronises.
template <int kDim, bool kWide>
__device__ void ScoreBranches(const GroupQueries<kDim, kWide>& q, const uint16_t* k, const Args& a,
                              const int2* kept, int first, int last, unsigned* scores) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int block_k = static_cast<int>(a.p.block_k), keys = (last - first) * block_k;
  for (int place = first + static_cast<int>(threadIdx.x); place < last; place += kThreads) {
    scores[place] = 0;
  }
  __syncthreads();
  for (int tile = threadIdx.x / 32 * kTile; tile < keys; tile += kWarps * kTile) {
    const int own = min(tile + g, keys - 1);
    const int row = RepresentativeRow(kept, first + own / block_k, own % block_k, a);
    float best[2];
    q.BestProducts(k + static_cast<int64_t>(max(row, 0)) * kDim, best);
    if (g != 0) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = tile + 2 * t + i;
      if (key >= keys) continue;
      const int place = first + key / block_k;
      if (RepresentativeRow(kept, place, key % block_k, a) < 0) continue;
      atomicMax(&scores[place], KeyOf(best[i]));
    }
  }
  __syncthreads();
}

// Grid: (blocks, kv_heads).
template <int kDim, bool kWide>
__global__ void __launch_bounds__(kThreads, 1) HipSelectKernel(const Args a) {
  extern __shared__ int2 dynamic[];  // kept [wanted], next [wanted]; then scores [2 * wanted]
  __shared__ BlockSelectScratch<kThreads> scratch;
  AllowNextLaunch();  // every block is resident: what begins early takes no place from them
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  RowSync* sync = a.sync + head;
  const int rows = static_cast<int>(a.p.rows), block_k = static_cast<int>(a.p.block_k);
  const int key_blocks = (rows + block_k - 1) / block_k;
  const uint16_t* k = a.p.kv.k + head * a.p.kv.row_stride * kDim;
  const GroupQueries<kDim, kWide> q(a.p.q + head * a.p.group * kDim, static_cast<int>(a.p.group));

  int2 *kept = dynamic, *next = dynamic + a.wanted;
  auto* scores = reinterpret_cast<unsigned*>(dynamic + 2 * a.wanted);
  int count = min(a.wanted, key_blocks);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    kept[i] = make_int2(static_cast<int>(static_cast<int64_t>(i) * key_blocks / count),
                        static_cast<int>(static_cast<int64_t>(i + 1) * key_blocks / count));
  }
  __syncthreads();
  for (int round = 0;; ++round) {
    int unfinished = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) unfinished |= kept[i].y - kept[i].x > 1;
    if (!__syncthreads_or(unfinished)) break;
    const int places = 2 * count, share = (places + blocks - 1) / blocks;
    const int first = min(places, block * share), last = min(places, first + share);
    ScoreBranches(q, k, a, kept, first, last, scores);
    if (blocks > 1) {
      unsigned* all = a.scores + (2 * static_cast<int64_t>(head) + round % 2) * 2 * a.wanted;
      for (int i = first + static_cast<int>(threadIdx.x); i < last; i += kThreads) {
        __stcg(all + i, scores[i]);
      }
      RowBarrier(sync, block, blocks);
      for (int i = threadIdx.x; i < places; i += kThreads) scores[i] = __ldcg(all + i);
      __syncthreads();
    }
    count = SelectInBlock<kThreads>(
        places, a.wanted, [&](int place) { return scores[place]; }, scratch,
        [&](int rank, int place) { next[rank] = BranchAt(kept, place); });
    __syncthreads();
    int2* swap = kept;
    kept = next;
    next = swap;
  }
  if (block != 0) return;

  // Only the last block of keys may be short, and it comes last.
  int32_t* ids = a.p.ids + head * a.p.ids_stride;
  const int found =
      count * block_k - (kept[count - 1].y == key_blocks ? key_blocks * block_k - rows : 0);
  const int taken = min(found, static_cast<int>(a.p.budget));
  for (int i = threadIdx.x; i < taken; i += kThreads) {
    ids[i] = kept[i / block_k].x * block_k + i % block_k;
  }
  if (threadIdx.x == 0) a.p.row_count[head] = taken;
}

int64_t Wanted(int64_t block_k, int64_t budget) {
  return std::max<int64_t>(1, budget / std::max<int64_t>(1, block_k));
}

size_t SyncBytes(int64_t kv_heads) {
  return (static_cast<size_t>(kv_heads) * sizeof(RowSync) + 255) / 256 * 256;
}

}  // namespace

size_t HipSelectWorkspaceBytes(int64_t kv_heads, int64_t block_k, int64_t budget) {
  return SyncBytes(kv_heads) +
         static_cast<size_t>(kv_heads * 4 * Wanted(block_k, budget)) * sizeof(unsigned);
}

cudaError_t HipSelect(const HipSelectParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > 16 || p.rows < 0 ||
      p.rows >= 1 << 30 || p.rows > p.kv.row_stride || (p.head_dim != 64 && p.head_dim != 128) ||
      p.block_k < 1 || p.block_k > 1024 || p.budget < 1 || p.budget > p.ids_stride ||
      Wanted(p.block_k, p.budget) > kMaxHipBranches) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  if (p.workspace == nullptr) return cudaErrorInvalidValue;
  Args a;
  a.p = p;
  a.wanted = static_cast<int>(Wanted(p.block_k, p.budget));
  auto* bytes = static_cast<uint8_t*>(p.workspace);
  a.sync = reinterpret_cast<RowSync*>(bytes);
  a.scores = reinterpret_cast<unsigned*>(bytes + SyncBytes(p.kv_heads));
  // One tile of keys per warp, as far as one block per SM goes.
  const int64_t tiles = (2 * a.wanted * p.block_k + kTile - 1) / kTile;
  const int64_t blocks = std::clamp<int64_t>((tiles + kWarps - 1) / kWarps, 1,
                                             std::max<int64_t>(1, ResidentBlocks(1) / p.kv_heads));
  const bool wide = p.group > 8;
  const auto kernel = p.head_dim == 64
                          ? (wide ? HipSelectKernel<64, true> : HipSelectKernel<64, false>)
                          : (wide ? HipSelectKernel<128, true> : HipSelectKernel<128, false>);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.kv_heads));
  const size_t shared = static_cast<size_t>(a.wanted) * (2 * sizeof(int2) + 2 * sizeof(unsigned));
  return LaunchTogether(kernel, grid, kThreads, shared, a, stream);
}

}  // namespace carrel::kernels
