// A code's bits are one operand of integer tensor core products, without being spread first: of a word,
// the bits at i, i + 8, i + 16 and i + 24 are four bytes of value 2^(i mod 4) under a mask, and the
// weights, the other operand, are 2^(3 - i mod 4) times as large. 16 keys are A, up to 8 q heads B.
// Each block makes the weights and the base for itself, so that nothing has to run before. From there on
// as hamming_topk: scores stay in shared memory, one barrier per KV head joins the histograms.
#include <algorithm>
#include <type_traits>

#include "kernels/code_topk/code_topk.h"
#include "kernels/mma-inl.cuh"
#include "kernels/select-inl.cuh"
#include "kernels/softmax_state-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 2;
constexpr int kTile = 16;  // keys of a product
constexpr int kMinBlockRows = 4 * kThreads;
constexpr int kItems = 8;  // scores that a lane looks at together: 16 bytes
constexpr int kMaxGroup = 16, kMaxBits = 256;
constexpr int kBins = kCodeTopKBins;
constexpr int kShift = 10;       // of fixed-point factors
constexpr int kLimit = 1 << 29;  // of what is added up in fixed point
// Weights are 8 = 2^3 times as large in a product, and bits count 0 or 1 instead of -1 or 1.
constexpr float kUnitsPerWeight = 4;

struct Plan {
  int64_t blocks = 1;  // of a KV head
  int64_t share = 0;   // rows of a block, a multiple of kItems
  bool in_shared = true;
  size_t shared_bytes = 0;
  size_t published = 0, scores = 0, bytes = 0;  // offsets in the workspace, and its size
};

struct Args {
  CodeTopKParams p;
  RowSync* sync;        // [kv_heads]
  unsigned* published;  // [kv_heads, blocks, kBins + 1]
  uint16_t* scores;     // [kv_heads, blocks, share], or null: in shared memory
  int share, k;
};

constexpr size_t RoundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }
// Scores crowd around their mean: lanes that count into histograms of their own collide less. The
// copies begin four banks apart; what FindThreshold wants, twice kBins + 1, lies in their place later.
constexpr int kCopies = 8, kCopyStride = kBins + 4;
constexpr size_t kCountBytes = kCopies * kCopyStride * sizeof(unsigned);
static_assert(kCountBytes % 16 == 0 && kCopies * kCopyStride >= 2 * (kBins + 1));

// Static arrays of a block. Heads beyond the group weigh nothing and score nothing.
struct Group {
  int8_t weight[kMaxGroup][kMaxBits];
  float most[kWarps][kMaxGroup];  // of |u|, by the warps that made it
  int sums[kWarps][kMaxGroup];    // of the weights, likewise
  float step[kMaxGroup];
  int sum[kMaxGroup];
  int factor[kMaxGroup], offset[kMaxGroup];
  SoftmaxState of_warps[kWarps][kMaxGroup];
};

// The same for the same shape on the same device.
Plan PlanOf(const CodeTopKParams& p) {
  int device = 0, sms = 1, shared = 0;
  if (cudaGetDevice(&device) == cudaSuccess) {
    static_cast<void>(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    static_cast<void>(
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  }
  Plan plan;
  plan.blocks = std::clamp<int64_t>((p.rows + kMinBlockRows - 1) / kMinBlockRows, 1,
                                    std::max<int64_t>(1, sms * kBlocksPerSm / p.kv_heads));
  plan.share = ((p.rows + plan.blocks - 1) / plan.blocks + kItems - 1) / kItems * kItems;
  const size_t scores = (static_cast<size_t>(plan.share) * sizeof(uint16_t) + 15) / 16 * 16;
  // A block's static arrays, and what the system takes of each.
  constexpr size_t kReserved = sizeof(Group) + 8192;
  plan.in_shared = scores + kCountBytes + kReserved <= static_cast<size_t>(shared) / kBlocksPerSm;
  plan.shared_bytes = (plan.in_shared ? scores : 0) + kCountBytes;
  plan.published = RoundUp(static_cast<size_t>(p.kv_heads) * sizeof(RowSync));
  const auto blocks = static_cast<size_t>(p.kv_heads * plan.blocks);
  plan.scores = plan.published + RoundUp(blocks * (kBins + 1) * sizeof(unsigned));
  plan.bytes = plan.scores +
               (plan.in_shared ? 0 : blocks * static_cast<size_t>(plan.share) * sizeof(uint16_t));
  return plan;
}

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
        int sum = low + high;
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
  group.sum[h] = sum;
}

// The queries of one KV head, at most kHeads, as a warp's operand, and products with keys.
template <int kWords, int kHeads>
class Products {
 public:
  static constexpr int kLoads = kWords > 4 ? kWords / 4 : 1;  // words of a key in a lane
  static constexpr int kShares = kHeads > 8 ? 2 : 1;          // q heads 0 .. 7, 8 .. 15
  static constexpr int kTiles =
      kWords > 4 ? 2 : 4;                       // of a warp's step: their codes travel together
  static constexpr int kStep = kTiles * kTile;  // keys

  __device__ explicit Products(const Group& group) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < kShares; ++s) {
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        const int word = 4 * l + t;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          uint32_t bytes = 0;
          for (int m = 0; m < 4 && word < kWords; ++m) {
            const int weight = group.weight[g + 8 * s][32 * word + 8 * m + i] * (1 << (3 - i % 4));
            bytes |= (static_cast<uint32_t>(weight) & 0xff) << (8 * m);
          }
          weights_[s][l][i] = bytes;
        }
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

  // sums[s][0], [1]: of key g with heads 8 s + 2 t and 8 s + 2 t + 1; [2], [3]: of key 8 + g.
  __device__ void Sum(const Keys& keys, int (&sums)[kShares][4]) const {
#pragma unroll
    for (int s = 0; s < kShares; ++s) sums[s][0] = sums[s][1] = sums[s][2] = sums[s][3] = 0;
#pragma unroll
    for (int l = 0; l < kLoads; ++l) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const uint32_t mask = 0x01010101u << (i % 4), next = mask << 1;
        const uint32_t low = i < 4 ? keys.word[0][l] : keys.word[0][l] >> 4;
        const uint32_t high = i < 4 ? keys.word[1][l] : keys.word[1][l] >> 4;
#pragma unroll
        for (int s = 0; s < kShares; ++s) {
          asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
              "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
              : "+r"(sums[s][0]), "+r"(sums[s][1]), "+r"(sums[s][2]), "+r"(sums[s][3])
              : "r"(low & mask), "r"(high & mask), "r"(low & next), "r"(high & next),
                "r"(weights_[s][l][i]), "r"(weights_[s][l][i + 1]));
        }
      }
    }
  }

 private:
  uint32_t weights_[kShares][kLoads][8];
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

// Fixed-point factors and offsets of each head: bin = (sum * factor + offset) >> kShift. All threads;
// synchronises.
template <int kWords, int kHeads>
__device__ void MakeBase(const Args& a, const Products<kWords, kHeads>& products,
                         const typename Products<kWords, kHeads>::Keys& sample, Group& group) {
  using P = Products<kWords, kHeads>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int samples = static_cast<int>(min(a.p.rows, static_cast<int64_t>(kCodeTopKSamples)));
  int sums[P::kShares][4];
  products.Sum(sample, sums);
#pragma unroll
  for (int s = 0; s < P::kShares; ++s) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int h = 8 * s + 2 * t + odd;
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = static_cast<float>(sums[s][2 * i + odd]) / kUnitsPerWeight;
        const bool there = warp * kTile + 8 * i + g < samples;
        x[i] = there ? group.step[h] * (sum - static_cast<float>(group.sum[h])) : -INFINITY;
      }
      float max = fmaxf(x[0], x[1]);
#pragma unroll
      for (int m = 4; m <= 16; m *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, m));
      float sum = max == -INFINITY ? 0.0f : __expf(x[0] - max) + __expf(x[1] - max);
#pragma unroll
      for (int m = 4; m <= 16; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
      if (g == 0) group.of_warps[warp][h] = {max, sum};
    }
  }
  __syncthreads();
  const int h = warp;  // a warp per head
  if (h < a.p.group) {
    const SoftmaxState of_head =
        JoinWarp(lane < kWarps ? group.of_warps[lane][h] : SoftmaxState{-INFINITY, 0});
    const float base = of_head.max + logf(of_head.sum * static_cast<float>(a.p.rows) /
                                          static_cast<float>(samples));
    const float fixed = kCodeTopKSteps * (1 << kShift);
    const float most = kLimit / (8.0f * kCodeTopKWeight * 32 * kWords);
    const float offset =
        (-kCodeTopKLeast - base - group.step[h] * static_cast<float>(group.sum[h])) * fixed;
    if (lane == 0) {
      group.factor[h] = __float2int_rn(fminf(group.step[h] / kUnitsPerWeight * fixed, most));
      group.offset[h] = __float2int_rn(fminf(fmaxf(offset, -kLimit), kLimit));
    }
  } else if (lane == 0) {
    group.factor[h] = 0;
    group.offset[h] = -kLimit;
  }
  __syncthreads();
}

// Both as unsigned 16 bits, what is out of their range at its end; low in the low half.
__device__ __forceinline__ unsigned PackSaturated(int low, int high) {
  unsigned pair;
  asm("cvt.pack.sat.u16.s32 %0, %1, %2;" : "=r"(pair) : "r"(high), "r"(low));
  return pair;
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
    int factor[P::kShares][2], offset[P::kShares][2];
#pragma unroll
    for (int s = 0; s < P::kShares; ++s) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        factor[s][odd] = group.factor[8 * s + 2 * t + odd];
        offset[s][odd] = group.offset[8 * s + 2 * t + odd];
      }
    }
    for (int at = first_; at < end_; at += kWarps * P::kStep) {
      typename P::Keys now[P::kTiles];
#pragma unroll
      for (int i = 0; i < P::kTiles; ++i) now[i] = keys_[i];
      if (at + kWarps * P::kStep < end_) Load(at + kWarps * P::kStep);
      const int row = at + 8 * t + g;
      uint16_t* to = scores + (row - begin_);
      unsigned* own_counts = counts + g % kCopies * kCopyStride;
      const bool whole = at + P::kStep <= end_;
#pragma unroll
      for (int i = 0; i < P::kTiles; ++i) {
        int sums[P::kShares][4];
        products.Sum(now[i], sums);
        int low = -kLimit, high = -kLimit;
#pragma unroll
        for (int s = 0; s < P::kShares; ++s) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            low = max(low, sums[s][odd] * factor[s][odd] + offset[s][odd]);
            high = max(high, sums[s][2 + odd] * factor[s][odd] + offset[s][odd]);
          }
        }
        unsigned pair = PackSaturated(low >> kShift, high >> kShift);
        pair = __vmaxu2(pair, __shfl_xor_sync(~0u, pair, 1));
        if constexpr (kHeads > 4) pair = __vmaxu2(pair, __shfl_xor_sync(~0u, pair, 2));
        pair = __vminu2(pair, (kBins - 1) * 0x10001u);
        if (t < 2 && (whole || row + kTile * i < end_)) {
          const unsigned score = t == 0 ? pair & 0xffff : pair >> 16;
          to[kTile * i] = static_cast<uint16_t>(score);
          atomicAdd(&own_counts[score], 1u);
        }
      }
    }
  }

 private:
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

// Grid: (blocks, kv_heads).
template <int kWords, int kDim, int kHeads>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) CodeTopKKernel(const Args a) {
  extern __shared__ __align__(16)
      uint8_t dynamic[];  // counts and before, then scores if they are here
  __shared__ Group group;
  auto* counts = reinterpret_cast<unsigned*>(dynamic);
  unsigned* before = counts + kBins + 1;
  AllowNextLaunch();  // every block is resident: what begins early takes no place from them
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  const unsigned generation = Generation(a.sync + head);
  uint16_t* scores = a.scores == nullptr
                         ? reinterpret_cast<uint16_t*>(dynamic + kCountBytes)
                         : a.scores + (static_cast<int64_t>(head) * blocks + block) * a.share;
  for (int t = threadIdx.x; t < kCopies * kCopyStride; t += kThreads) counts[t] = 0;
  const uint32_t* codes = a.p.codes + head * a.p.code_stride * kWords;
  const int rows = static_cast<int>(a.p.rows);
  const int begin = min(rows, block * a.share), end = min(rows, begin + a.share);
  // What needs no query travels while the rest is made.
  typename Products<kWords, kHeads>::Keys sample;
  LoadSample<Products<kWords, kHeads>>(codes, rows, sample);
  RowScores<kWords, kHeads> row_scores(codes, begin, end);
  MakeWeights<32 * kWords, kDim, kHeads>(a, head, group);
  const Products<kWords, kHeads> products(group);
  __syncthreads();
  MakeBase(a, products, sample, group);
  row_scores.Score(products, group, scores, counts);
  SumCopies(counts);

  const Threshold found =
      FindThreshold<kThreads>(counts, before, kBins, static_cast<unsigned>(a.k),
                              a.published + static_cast<int64_t>(head) * blocks * (kBins + 1),
                              a.sync + head, generation, block, blocks);
  int32_t* ids = a.p.ids + head * a.p.k;
  const auto load = [&](int j) { return *reinterpret_cast<const uint4*>(scores + (j - begin)); };
  TakeSelected<kThreads, kItems>(
      begin, end, found.digit,
      [&](int j, unsigned(&of_lane)[kItems]) {
        const uint4 x = load(j);
        const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_lane[2 * i] = words[i] & 0xffff;
          of_lane[2 * i + 1] = words[i] >> 16;
        }
      },
      [&](int j) {
        const uint4 x = load(j);
        const unsigned pair = __vmaxu2(__vmaxu2(x.x, x.y), __vmaxu2(x.z, x.w));
        return max(pair & 0xffff, pair >> 16);
      },
      [&](bool above, unsigned rank, int j) {
        const unsigned at =
            above ? found.above_before + rank : found.above + found.equal_before + rank;
        if (at < static_cast<unsigned>(a.k)) ids[at] = j;
      });
}

template <int kWords, int kDim>
auto KernelOfHeads(int64_t group) {
  return group <= 4   ? CodeTopKKernel<kWords, kDim, 4>
         : group <= 8 ? CodeTopKKernel<kWords, kDim, 8>
                      : CodeTopKKernel<kWords, kDim, kMaxGroup>;
}
template <int kWords>
auto KernelFor(int64_t head_dim, int64_t group) {
  return head_dim == 64 ? KernelOfHeads<kWords, 64>(group) : KernelOfHeads<kWords, 128>(group);
}

}  // namespace

size_t CodeTopKWorkspaceBytes(const CodeTopKParams& params) {
  return params.rows == 0 ? 0 : PlanOf(params).bytes;
}

cudaError_t CodeTopK(const CodeTopKParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > kMaxGroup ||
      (p.head_dim != 64 && p.head_dim != 128) || (p.bits != 64 && p.bits != 128 && p.bits != 256) ||
      p.rows < 0 || p.rows > p.code_stride || p.rows >= 1 << 30 || p.k < 0 || !(p.scale > 0)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0 || p.k == 0) return cudaSuccess;
  if (p.workspace == nullptr) return cudaErrorInvalidValue;
  const Plan plan = PlanOf(p);
  auto* bytes = static_cast<uint8_t*>(p.workspace);
  Args a;
  a.p = p;
  a.sync = reinterpret_cast<RowSync*>(bytes);
  a.published = reinterpret_cast<unsigned*>(bytes + plan.published);
  a.scores = plan.in_shared ? nullptr : reinterpret_cast<uint16_t*>(bytes + plan.scores);
  a.share = static_cast<int>(plan.share);
  a.k = static_cast<int>(std::min(p.k, p.rows));
  const auto kernel = p.bits == 64    ? KernelFor<2>(p.head_dim, p.group)
                      : p.bits == 128 ? KernelFor<4>(p.head_dim, p.group)
                                      : KernelFor<8>(p.head_dim, p.group);
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(plan.shared_bytes));
      error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(p.kv_heads));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = plan.blocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace carrel::kernels
