// A code's bits are an operand of binary tensor core products as they lie. The other operand is the
// bit planes of the weights, six of each q head: column 2 t + odd of a product is a plane of a head
// that lane t of a quad looks after, which so has all planes of it and adds them up. 16 keys are A.
// Each block makes the weights and the base for itself, so that nothing has to run before. From
// there on as hamming_topk: scores stay in shared memory, one barrier per KV head joins the
// histograms.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/mma-inl.cuh"
#include "kernels/score_select-inl.cuh"
#include "kernels/select/code_topk/code_topk.h"
#include "kernels/softmax_state-inl.cuh"
#include "kernels/together-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 2;
constexpr int kTile = 16;  // keys of a product
constexpr int kLeastBlockRows = 4 * kThreads;
constexpr int kMaxGroup = 16, kMaxBits = 256;
constexpr int kPlanes = 6, kPairs = kPlanes / 2;  // of a weight, of which the highest is negative
static_assert(kCodeTopKWeight < 1 << (kPlanes - 1));
constexpr int kBins = kCodeTopKBins;
constexpr int kShift = 16;       // of fixed-point scores: a score is the upper half of its word
constexpr int kLimit = 1 << 30;  // of what is added up in fixed point

struct Args {
  CodeTopKParams p;
  ScoreRows rows;
};

// Scores crowd around their mean: lanes that count into histograms of their own collide less. The
// copies begin four banks apart; FindThreshold finds their sum in the place of the first.
constexpr int kCopies = 8, kCopyStride = kBins + 4;
constexpr size_t kCountBytes = kCopies * kCopyStride * sizeof(unsigned);
static_assert(kCountBytes % 16 == 0 && kCopyStride >= kBins + 1);

// Static arrays of a block. Heads beyond the group weigh nothing and score nothing.
struct Group {
  int8_t weight[kMaxGroup][kMaxBits + 16];  // heads begin four banks apart
  float most[kWarps][kMaxGroup];            // of |u|, by the warps that made it
  int sums[kWarps][kMaxGroup];              // of the weights and their sizes, likewise
  float step[kMaxGroup];
  int sum[kMaxGroup];
  int factor[kMaxGroup], offset[kMaxGroup];
  SoftmaxState of_warps[kWarps][kMaxGroup];
};

ScorePlan PlanOf(const CodeTopKParams& p, int64_t sequences = 1) {
  return PlanScores({.rows = p.rows,
                     .kv_heads = p.kv_heads,
                     .sequences = sequences,
                     .least_block_rows = kLeastBlockRows,
                     .blocks_per_sm = kBlocksPerSm,
                     .count_bytes = kCountBytes,
                     .static_bytes = sizeof(Group) + 8192,
                     .published = kBins + 1});
}

// A sum and a sum of sizes, of at most 2^13, in one number.
constexpr int kSizes = 1 << 16;
__device__ __forceinline__ int WithSize(int weight) { return weight + kSizes * abs(weight); }
__device__ __forceinline__ int SizeOf(int both) { return (both + kSizes / 2) / kSizes; }

// Weights and steps: the decoder's rows are A of the tensor cores, 16 of a warp, the queries B. All
// threads; synchronises, but group.sum needs one more.
template <int kBits, int kDim, int kHeads>
__device__ void MakeWeights(const Args& a, int head, Group& group) {
  constexpr int kLoads = kDim / 32, kShares = kHeads > 8 ? 2 : 1, kMakers = kBits / 16;
  static_assert(kMakers <= kWarps);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int heads = static_cast<int>(a.p.group);
  float u[kShares][4] = {};
  if (warp < kMakers) {
    const uint16_t* rows =
        a.p.decoder + (static_cast<int64_t>(head) * kBits + 16 * warp + g) * kDim + 8 * t;
    const uint16_t* q = a.p.q + (static_cast<int64_t>(head) * heads + g) * kDim + 8 * t;
    uint4 low[kLoads], high[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      low[j] = LoadStream16(rows + 32 * j);
      high[j] = LoadStream16(rows + 8 * kDim + 32 * j);
    }
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const uint4 of_q =
            g + 8 * s < heads ? LoadStream16(q + 8 * s * kDim + 32 * j) : uint4{0, 0, 0, 0};
        MmaPair(u[s], low[j], high[j], of_q);
      }
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float most = fmaxf(fabsf(u[s][odd]), fabsf(u[s][2 + odd]));
#pragma unroll
        for (int m = 4; m <= 16; m *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
        if (g == 0) group.most[warp][8 * s + 2 * t + odd] = most;
      }
    }
  }
  __syncthreads();
  if (warp < kMakers) {
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int h = 8 * s + 2 * t + odd;
        float most = group.most[0][h];
#pragma unroll
        for (int w = 1; w < kMakers; ++w) most = fmaxf(most, group.most[w][h]);
        const float per_step = most > 0 ? kCodeTopKWeight / most : 0.0f;
        const int low = __float2int_rn(u[s][odd] * per_step);
        const int high = __float2int_rn(u[s][2 + odd] * per_step);
        group.weight[h][16 * warp + g] = static_cast<int8_t>(low);
        group.weight[h][16 * warp + 8 + g] = static_cast<int8_t>(high);
        int sum = WithSize(low) + WithSize(high);
#pragma unroll
        for (int m = 4; m <= 16; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
        if (g == 0) group.sums[warp][h] = sum;
        if (g == 0 && warp == 0) group.step[h] = a.p.scale * most / kCodeTopKWeight;
      }
    }
  }
  __syncthreads();
  const int h = threadIdx.x;
  if (h >= 8 * kShares) return;
  int sum = 0;
#pragma unroll
  for (int w = 0; w < kMakers; ++w) sum += group.sums[w][h];
  const int size = SizeOf(sum);
  group.sum[h] = sum - kSizes * size;
  group.step[h] = fminf(group.step[h], kCodeTopKMost / static_cast<float>(max(size, 1)));
}

// The queries of one KV head, at most kHeads, as a warp's operands, and products with keys.
template <int kWords, int kHeads>
class Products {
 public:
  static constexpr int kLoads = kWords > 4 ? kWords / 4 : 1;  // words of a key in a lane
  static constexpr int kShares = kHeads / 4;                  // q heads of a lane: t, 4 + t, ...
  static constexpr int kTiles = 4;                            // of a warp's step
  static constexpr int kStep = kTiles * kTile;                // keys

  __device__ explicit Products(const Group& group) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        uint32_t planes[kPairs] = {};
        if (4 * l + t < kWords) {
          const auto* weights =
              reinterpret_cast<const uint32_t*>(&group.weight[4 * s + g / 2][32 * (4 * l + t)]);
#pragma unroll
          for (int m = 0; m < 8; ++m) {
            const uint32_t of_bits = weights[m] >> g % 2;
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
              // One bit of each byte; the product brings the four together.
              const uint32_t bits = of_bits >> 2 * pair & 0x01010101u;
              planes[pair] |= (bits * 0x01020408u >> 24) << 4 * m;
            }
          }
        }
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) planes_[s][pair][l] = planes[pair];
      }
    }
  }

  // This lane's words of the keys that g and 8 + g name.
  struct Keys {
    uint32_t word[2][kLoads];
  };
  __device__ static void Load(const uint32_t* codes, int64_t low, int64_t high, Keys& keys) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
      const bool there = 4 * l + t < kWords;
      keys.word[0][l] = there ? LoadStream4(codes + low * kWords + 4 * l + t) : 0;
      keys.word[1][l] = there ? LoadStream4(codes + high * kWords + 4 * l + t) : 0;
    }
  }

  // Of head 4 s + t, add + factor * sum of the weights of a key's bits: [0] of key g, [1] of key 8
  // + g.
  __device__ void Sum(const Keys& keys, int s, int factor, int add, int (&sums)[2]) const {
    sums[0] = sums[1] = add;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      int c[4] = {0, 0, 0, 0};
      if constexpr (kLoads == 1) {
        asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc "
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(keys.word[0][0]), "r"(keys.word[1][0]), "r"(planes_[s][pair][0]));
      } else {
        asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(keys.word[0][0]), "r"(keys.word[1][0]), "r"(keys.word[0][kLoads - 1]),
              "r"(keys.word[1][kLoads - 1]), "r"(planes_[s][pair][0]),
              "r"(planes_[s][pair][kLoads - 1]));
      }
      const int high = pair == kPairs - 1 ? -2 : 2;
      const int of_pair = factor << 2 * pair;
      sums[0] += of_pair * (c[0] + high * c[1]);
      sums[1] += of_pair * (c[2] + high * c[3]);
    }
  }

 private:
  uint32_t planes_[kShares][kPairs][kLoads];
};

// The sampled keys of a warp's tile.
template <class P>
__device__ void LoadSample(const uint32_t* codes, int64_t rows, typename P::Keys& keys) {
  static_assert(kCodeTopKSamples == kWarps * kTile && kCodeTopKSamples == 256);
  const int lane = threadIdx.x % 32, low = threadIdx.x / 32 * kTile + lane / 4, high = low + 8;
  if (rows >= kCodeTopKSamples) {
    P::Load(codes, low * rows >> 8, high * rows >> 8, keys);
  } else {
    P::Load(codes, min(static_cast<int64_t>(low), rows - 1),
            min(static_cast<int64_t>(high), rows - 1), keys);
  }
}

// Fixed-point factors and offsets of each head: bin = (sum * factor + offset) >> kShift. All
// threads; synchronises.
template <int kWords, int kHeads>
__device__ void MakeBase(const Args& a, const Products<kWords, kHeads>& products,
                         const typename Products<kWords, kHeads>::Keys& sample, Group& group) {
  using P = Products<kWords, kHeads>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int samples = static_cast<int>(min(a.p.rows, static_cast<int64_t>(kCodeTopKSamples)));
#pragma unroll
  for (int s = 0; s < P::kShares; ++s) {
    const int h = 4 * s + t;
    int sums[2];
    products.Sum(sample, s, 2, -group.sum[h], sums);
    float x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool there = warp * kTile + 8 * i + g < samples;
      x[i] = there ? group.step[h] * static_cast<float>(sums[i]) : -INFINITY;
    }
    float max = fmaxf(x[0], x[1]);
#pragma unroll
    for (int m = 4; m <= 16; m *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, m));
    float sum = max == -INFINITY ? 0.0f : __expf(x[0] - max) + __expf(x[1] - max);
#pragma unroll
    for (int m = 4; m <= 16; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
    if (g == 0) group.of_warps[warp][h] = {max, sum};
  }
  __syncthreads();
  const int h = warp;  // a warp per head
  if (h < a.p.group) {
    const SoftmaxState of_head =
        JoinWarp(lane < kWarps ? group.of_warps[lane][h] : SoftmaxState{-INFINITY, 0});
    const float base = of_head.max + logf(of_head.sum * static_cast<float>(a.p.rows) /
                                          static_cast<float>(samples));
    const float fixed = kCodeTopKSteps * (1 << kShift);
    const float offset =
        (-kCodeTopKLeast - base - group.step[h] * static_cast<float>(group.sum[h])) * fixed;
    if (lane == 0) {
      group.factor[h] = __float2int_rn(2 * group.step[h] * fixed);
      group.offset[h] = __float2int_rn(fminf(fmaxf(offset, -kLimit), kLimit));
    }
  } else if (lane == 0) {
    group.factor[h] = 0;
    group.offset[h] = -kLimit;
  }
  __syncthreads();
}

// Scores of the rows [begin, end), and how many there are of each.
template <int kWords, int kHeads>
class RowScores {
  using P = Products<kWords, kHeads>;

 public:
  __device__ RowScores(const uint32_t* codes, int begin, int end)
      : lane_(threadIdx.x % 32),
        first_(begin + static_cast<int>(threadIdx.x) / 32 * P::kStep),
        begin_(begin),
        end_(end),
        codes_(codes) {
    if (first_ < end_) Load(first_);
  }

  __device__ void Score(const P& products, const Group& group, uint16_t* scores, unsigned* counts) {
    const int g = lane_ / 4, t = lane_ % 4;
    int factor[P::kShares], offset[P::kShares];
#pragma unroll
    for (int s = 0; s < P::kShares; ++s) {
      factor[s] = group.factor[4 * s + t];
      offset[s] = group.offset[4 * s + t];
    }
    unsigned* own_counts = counts + g % kCopies * kCopyStride;
    for (int at = first_; at < end_; at += kWarps * P::kStep) {
      typename P::Keys now[P::kTiles];
#pragma unroll
      for (int i = 0; i < P::kTiles; ++i) now[i] = keys_[i];
      if (at + kWarps * P::kStep < end_) Load(at + kWarps * P::kStep);
      unsigned pairs[P::kTiles];  // of each tile: keys g, low, and 8 + g, of this lane's heads
#pragma unroll
      for (int i = 0; i < P::kTiles; ++i) {
        int low = 0, high = 0;  // below 0 is as 0
#pragma unroll
        for (int s = 0; s < P::kShares; ++s) {
          int sums[2];
          products.Sum(now[i], s, factor[s], offset[s], sums);
          low = max(low, sums[0]);
          high = max(high, sums[1]);
        }
        pairs[i] = HighHalves(static_cast<uint32_t>(low), static_cast<uint32_t>(high));
      }
      const unsigned pair = __vminu2(BestOfQuad(pairs, t), (kBins - 1) * 0x10001u);
      const int row = at + kTile * t + g;
      uint16_t* to = scores + (row - begin_);
      if (row < end_) {
        to[0] = static_cast<uint16_t>(pair);
        atomicAdd(&own_counts[pair & 0xffff], 1u);
      }
      if (row + 8 < end_) {
        to[8] = static_cast<uint16_t>(pair >> 16);
        atomicAdd(&own_counts[pair >> 16], 1u);
      }
    }
  }

 private:
  // Of the four lanes' values for tile t, the largest, half by half.
  __device__ static unsigned BestOfQuad(const unsigned (&pairs)[4], int t) {
    static_assert(P::kTiles == 4);
    const bool odd = t % 2 != 0, upper = t >= 2;
    const unsigned low =
        __vmaxu2(odd ? pairs[1] : pairs[0], __shfl_xor_sync(~0u, odd ? pairs[0] : pairs[1], 1));
    const unsigned high =
        __vmaxu2(odd ? pairs[3] : pairs[2], __shfl_xor_sync(~0u, odd ? pairs[2] : pairs[3], 1));
    return __vmaxu2(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, 2));
  }

  // Beyond the end the last row is read again.
  __device__ void Load(int at) {
    const int g = lane_ / 4;
    if (at + P::kStep <= end_) {
      const uint32_t* row = codes_ + static_cast<int64_t>(at + g) * kWords;
#pragma unroll
      for (int i = 0; i < P::kTiles; ++i) P::Load(row, kTile * i, kTile * i + 8, keys_[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < P::kTiles; ++i) {
      P::Load(codes_, min(at + kTile * i + g, end_ - 1), min(at + kTile * i + 8 + g, end_ - 1),
              keys_[i]);
    }
  }

  const int lane_, first_, begin_, end_;
  const uint32_t* codes_;
  typename P::Keys keys_[P::kTiles];
};

// Into the first copy. All threads; synchronises before and after.
__device__ void SumCopies(unsigned* counts) {
  static_assert(kThreads == kBins);
  __syncthreads();
  unsigned sum = 0;
#pragma unroll
  for (int c = 0; c < kCopies; ++c) sum += counts[c * kCopyStride + threadIdx.x];
  __syncthreads();
  counts[threadIdx.x] = sum;
  __syncthreads();
}

// Grid: (blocks, kv_heads, sequences).
template <int kWords, int kDim, int kHeads>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    CodeTopKKernel(const __grid_constant__ Together<Args> all) {
  const Args& a = all.own();
  extern __shared__ __align__(16) uint8_t dynamic[];  // counts, then scores if they are here
  __shared__ Group group;
  auto* counts = reinterpret_cast<unsigned*>(dynamic);
  AllowNextLaunch();  // every block is resident: what begins early takes no place from them
  const int head = blockIdx.y, block = blockIdx.x, blocks = a.rows.blocks;
  if (block >= blocks) return;
  uint16_t* scores = a.rows.OfBlock(dynamic + kCountBytes);
  for (int t = threadIdx.x; t < kCopies * kCopyStride; t += kThreads) counts[t] = 0;
  const uint32_t* codes = a.p.codes + head * a.p.code_stride * kWords;
  const int begin = a.rows.begin(), end = a.rows.end();
  // What needs no query travels while the rest is made.
  typename Products<kWords, kHeads>::Keys sample;
  LoadSample<Products<kWords, kHeads>>(codes, a.rows.rows, sample);
  RowScores<kWords, kHeads> row_scores(codes, begin, end);
  MakeWeights<32 * kWords, kDim, kHeads>(a, head, group);
  const Products<kWords, kHeads> products(group);
  __syncthreads();
  MakeBase(a, products, sample, group);
  row_scores.Score(products, group, scores, counts);
  SumCopies(counts);

  const Threshold found =
      FindThreshold<kThreads>(counts, kBins, static_cast<unsigned>(a.rows.k),
                              a.rows.published + static_cast<int64_t>(head) * blocks * (kBins + 1),
                              a.rows.sync + head, block, blocks);
  TakeScores<kThreads>(scores, begin, end, found.digit, found.above_before,
                       found.above + found.equal_before, a.rows.k, a.p.ids + head * a.p.k);
}

template <int kWords, int kDim>
auto KernelOfHeads(int64_t group) {
  return group <= 4   ? CodeTopKKernel<kWords, kDim, 4>
         : group <= 8 ? CodeTopKKernel<kWords, kDim, 8>
                      : CodeTopKKernel<kWords, kDim, kMaxGroup>;
}
template <int kWords>
auto KernelOfDim(int64_t head_dim, int64_t group) {
  return head_dim == 64 ? KernelOfHeads<kWords, 64>(group) : KernelOfHeads<kWords, 128>(group);
}
auto KernelFor(const CodeTopKParams& p) {
  return p.bits == 64    ? KernelOfDim<2>(p.head_dim, p.group)
         : p.bits == 128 ? KernelOfDim<4>(p.head_dim, p.group)
                         : KernelOfDim<8>(p.head_dim, p.group);
}

bool Served(const CodeTopKParams& p) {
  const bool nothing = p.rows == 0 || p.k == 0;
  return p.kv_heads >= 1 && p.kv_heads <= 65535 && p.group >= 1 && p.group <= kMaxGroup &&
         (p.head_dim == 64 || p.head_dim == 128) &&
         (p.bits == 64 || p.bits == 128 || p.bits == 256) && p.rows >= 0 &&
         p.rows <= p.code_stride && p.rows < 1 << 30 && p.k >= 0 && p.scale > 0 &&
         (nothing || p.workspace != nullptr);
}

bool Alike(const CodeTopKParams& a, const CodeTopKParams& b) {
  return a.kv_heads == b.kv_heads && a.group == b.group && a.head_dim == b.head_dim &&
         a.bits == b.bits;
}

const CodeTopKParams& WithMostRows(std::span<const CodeTopKParams> some) {
  return *std::max_element(some.begin(), some.end(),
                           [](const auto& a, const auto& b) { return a.rows < b.rows; });
}

// All in one launch.
cudaError_t Launch(std::span<const CodeTopKParams> some, cudaStream_t stream) {
  const CodeTopKParams& most = WithMostRows(some);
  const ScorePlan plan = PlanOf(most, static_cast<int64_t>(some.size()));
  int64_t share = plan.share;
  // Who has few rows takes fewer blocks, of which its workspace has room for no more than it has alone.
  const auto plan_of = [&](const CodeTopKParams& p) {
    ScorePlan own = PlanOf(p);
    own.in_shared = plan.in_shared;
    own.blocks = std::min(own.blocks, plan.blocks);
    own.share = ScoreShare(p.rows, own.blocks);
    share = std::max(share, own.share);
    return own;
  };
  const auto all = TogetherOf(some, [&](const CodeTopKParams& p) {
    return Args{p, {plan_of(p), p.workspace, p.rows, p.k}};
  });
  const size_t scores = plan.in_shared ? static_cast<size_t>(share) * sizeof(uint16_t) : 0;
  const dim3 grid(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(most.kv_heads),
                  static_cast<unsigned>(some.size()));
  return LaunchTogether(KernelFor(most), grid, kThreads, kCountBytes + scores, all, stream);
}

// How many sequences may share a launch: their blocks are resident together and keep their scores in shared
// memory. A workspace has no room for others.
size_t MostInLaunch(std::span<const CodeTopKParams> some) {
  const CodeTopKParams& most = WithMostRows(some);
  size_t n = some.size();
  while (n > 1 && (static_cast<int64_t>(n) * most.kv_heads > ResidentBlocks(kBlocksPerSm) ||
                   !PlanOf(most, static_cast<int64_t>(n)).in_shared)) {
    --n;
  }
  return n;
}

cudaError_t LaunchAlike(std::span<const CodeTopKParams> some, cudaStream_t stream) {
  const size_t most = MostInLaunch(some), launches = (some.size() + most - 1) / most;
  for (size_t i = 0, begin = 0; i < launches; ++i) {
    const size_t end = some.size() * (i + 1) / launches;
    RETURN_IF_FAILED(Launch(some.subspan(begin, end - begin), stream));
    begin = end;
  }
  return cudaSuccess;
}

}  // namespace

size_t CodeTopKWorkspaceBytes(const CodeTopKParams& params) {
  return params.rows == 0 ? 0 : PlanOf(params).bytes;
}

cudaError_t CodeTopK(std::span<const CodeTopKParams> all, cudaStream_t stream) {
  if (!std::all_of(all.begin(), all.end(), Served)) return cudaErrorInvalidValue;
  std::vector<CodeTopKParams> some;
  for (const CodeTopKParams& p : all) {
    if (p.rows > 0 && p.k > 0) some.push_back(p);
  }
  return ForStretches(
      std::span<const CodeTopKParams>(some), Alike,
      [&](std::span<const CodeTopKParams> alike) { return LaunchAlike(alike, stream); });
}

}  // namespace carrel::kernels
