// A warp takes sixteen chunks through their descents at once. The halves' keys that they compare are
// the columns of four products with eight columns each: two of earlier halves, two of later ones. The
// block's queries lie in shared memory in the order in which a lane takes them, and serve two products
// each time they are read.
#include <algorithm>

#include "kernels/block_select-inl.cuh"
#include "kernels/select/block_prune/block_prune.h"
#include "kernels/turn-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;  // chunks of one product
constexpr int kGroups = 2;   // products of a kind
constexpr int kWarpChunks = kColumns * kGroups;
constexpr int kBlockChunks = kThreads / 32 * kWarpChunks;
constexpr int kMostQueries = 256;

struct Range {
  int begin, end;
};

// A unit's rows cut into chunks.
class Chunks {
 public:
  __device__ Chunks(const int32_t* begins, const ChosenRowsHead& head, int chunk)
      : begins_(begins),
        head_(head),
        chunk_(chunk),
        per_stretch_(head.count > 1 ? head.length / chunk : 0),
        count_((head.rows + chunk - 1) / chunk) {}

  __device__ int count() const { return count_; }
  __device__ Range At(int i) const {
    // All stretches but the last hold as many chunks; of one stretch there is nothing to find out.
    const int stretch = head_.count > 1 ? i / per_stretch_ : 0;
    const int begin = begins_[stretch] + (i - stretch * per_stretch_) * chunk_;
    const int rows = i == count_ - 1 ? head_.rows - i * chunk_ : chunk_;
    return {begin, begin + rows};
  }

 private:
  const int32_t* const begins_;
  const ChosenRowsHead head_;
  const int chunk_, per_stretch_, count_;
};

__device__ Chunks ChunksOf(const BlockPruneParams& p, int unit) {
  return Chunks(p.in.begins + unit * p.in.stride, p.in.heads[unit], static_cast<int>(p.chunk));
}

int64_t ScoreStride(const BlockPruneParams& p) { return (p.max_rows + p.chunk - 1) / p.chunk; }

// Columns' maxima over this lane's rows of a product.
__device__ __forceinline__ void TakeMaxima(float (&best)[2], const float (&c)[4]) {
  best[0] = fmaxf(best[0], fmaxf(c[0], c[2]));
  best[1] = fmaxf(best[1], fmaxf(c[1], c[3]));
}

// What 8 lanes of the same t hold of 8 values becomes one value each, the maximum of all: that of
// number g. Three exchanges, which halve what is left.
__device__ __forceinline__ float MaximumOfNumberG(const float (&values)[8]) {
  const int g = threadIdx.x % 32 / 4;
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool upper = (g & 4) != 0;
    const float sent = upper ? values[i] : values[i + 4];
    four[i] = fmaxf(upper ? values[i + 4] : values[i], __shfl_xor_sync(~0u, sent, 16));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool upper = (g & 2) != 0;
    const float sent = upper ? four[i] : four[i + 2];
    two[i] = fmaxf(upper ? four[i + 2] : four[i], __shfl_xor_sync(~0u, sent, 8));
  }
  const bool upper = (g & 1) != 0;
  const float sent = upper ? two[0] : two[1];
  return fmaxf(upper ? two[1] : two[0], __shfl_xor_sync(~0u, sent, 4));
}

// The queries of a unit in shared memory: [sides][tiles of 16][kLoads][2][lane] of 16 bytes.
template <int kDim>
struct Queries {
  static constexpr int kLoads = kDim / 32;
  static constexpr int kTile = kLoads * 2 * 32;

  __device__ static void Fill(uint4* to, const uint16_t* from, int queries, int tiles) {
    for (int i = threadIdx.x; i < tiles * kTile; i += kThreads) {
      const int lane = i % 32, half = i / 32 % 2, j = i / 64 % kLoads, tile = i / kTile;
      const int row = min(queries - 1, tile * 16 + lane / 4 + 8 * half);  // one twice: no matter
      to[i] = LoadStream16(from + row * kDim + 8 * (lane % 4) + 32 * j);
    }
  }
};

// One step of sixteen descents: the best product of each chunk's two keys with the queries. A lane
// names the keys of the chunks of its g, and gets their products.
template <int kDim, bool kTurned>
__device__ __forceinline__ void Compare(const uint4* right, const uint4* left, int tiles,
                                        const uint16_t* k, const TurnTable& table,
                                        const int64_t (&back)[kGroups],
                                        const int (&rows)[2][kGroups],
                                        float (&scores)[2][kGroups]) {
  constexpr int kLoads = kDim / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint4 keys[2][kGroups][kLoads];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        keys[side][a][j] =
            LoadStream16(k + static_cast<int64_t>(rows[side][a]) * kDim + 8 * t + 32 * j);
      }
    }
  }
  if constexpr (kTurned) {
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
      const float* const cosines = AnglesAt(table, back[a], kDim / 2);
#pragma unroll
      for (int j = 0; j < kLoads / 2; ++j) {
        const float* const of_lane = cosines + 8 * t + 32 * j;
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          Turn8(keys[side][a][j], keys[side][a][j + kLoads / 2], of_lane, of_lane + kDim / 2, -1);
        }
      }
    }
  }
  float best[2][kGroups][2];
#pragma unroll
  for (int i = 0; i < 2 * kGroups * 2; ++i) (&best[0][0][0])[i] = -INFINITY;
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const uint4* const queries = (side == 0 ? right : left) + tile * Queries<kDim>::kTile + lane;
      float c[kGroups][4] = {};
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const uint4 lo = queries[j * 64], hi = queries[j * 64 + 32];
#pragma unroll
        for (int a = 0; a < kGroups; ++a) MmaPair(c[a], lo, hi, keys[side][a][j]);
      }
#pragma unroll
      for (int a = 0; a < kGroups; ++a) TakeMaxima(best[side][a], c[a]);
    }
  }
  float values[8];  // number: side, group, column
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = (&best[0][0][0])[i];
  const float mine = MaximumOfNumberG(values);
  // Column g is one of t = g / 2.
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
      const int number = side * 4 + a * 2 + g % 2;
      scores[side][a] = __shfl_sync(~0u, mine, number * 4 + g / 2);
    }
  }
}

// Grid: (units, groups of kBlockChunks chunks): units that run at once visit the same chunks.
template <int kDim, bool kTurned>
__global__ void __launch_bounds__(kThreads, 2)
    DescendKernel(const BlockPruneParams p, int64_t score_stride) {
  extern __shared__ uint4 fragments[];
  const int unit = static_cast<int>(blockIdx.x);
  const int block = unit / static_cast<int>(p.kv_heads), head = unit % static_cast<int>(p.kv_heads);
  if (p.in.heads[unit].rows <= p.wanted) return;
  const Chunks chunks = ChunksOf(p, unit);
  const int first = static_cast<int>(blockIdx.y) * kBlockChunks;
  if (first >= chunks.count()) return;

  const int queries = static_cast<int>(p.queries), tiles = (queries + 15) / 16;
  const int64_t at = int64_t{unit} * p.queries * kDim;
  Queries<kDim>::Fill(fragments, p.right + at, queries, tiles);
  const uint4* left = fragments;
  if (p.left != nullptr) {
    left = fragments + tiles * Queries<kDim>::kTile;
    Queries<kDim>::Fill(fragments + tiles * Queries<kDim>::kTile, p.left + at, queries, tiles);
  }
  __syncthreads();

  const int lane = threadIdx.x % 32, g = lane / 4;
  const int of_warp = first + static_cast<int>(threadIdx.x) / 32 * kWarpChunks;
  if (of_warp >= chunks.count()) return;
  const Bf16* const k = p.kv.k + head * p.kv.row_stride * kDim;
  Range range[kGroups];
  int64_t back[kGroups];
  float score[kGroups];
#pragma unroll
  for (int a = 0; a < kGroups; ++a) {
    const int i = min(chunks.count() - 1, of_warp + a * kColumns + g);
    range[a] = chunks.At(i);
    back[a] = p.layout.first(block) - p.layout.zone_end(block) + 1 + (chunks.count() - 1 - i);
  }
  const auto open = [&] {
    return range[0].end - range[0].begin > 1 || range[1].end - range[1].begin > 1;
  };
  for (bool once = true; __any_sync(~0u, once || open()); once = false) {
    int rows[2][kGroups];  // later halves, earlier halves
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
      const int middle = (range[a].begin + range[a].end) / 2;
      rows[0][a] = (middle + range[a].end) / 2;  // of a chunk of one row both are that row
      rows[1][a] = (range[a].begin + middle) / 2;
    }
    float scores[2][kGroups];
    Compare<kDim, kTurned>(fragments, left, tiles, k, p.table, back, rows, scores);
#pragma unroll
    for (int a = 0; a < kGroups; ++a) {
      if (range[a].end - range[a].begin > 1) {
        const int middle = (range[a].begin + range[a].end) / 2;
        const bool later = scores[0][a] > scores[1][a];
        score[a] = later ? scores[0][a] : scores[1][a];
        (later ? range[a].begin : range[a].end) = middle;
      } else if (once) {
        score[a] = scores[0][a];
      }
    }
  }
#pragma unroll
  for (int a = 0; a < kGroups; ++a) {
    const int i = of_warp + a * kColumns + g;
    if (lane % 4 == 0 && i < chunks.count()) p.scores[unit * score_stride + i] = KeyOf(score[a]);
  }
}

// Grid: units.
__global__ void __launch_bounds__(kThreads)
    ChooseKernel(const BlockPruneParams p, int64_t score_stride) {
  __shared__ BlockSelectScratch<kThreads> scratch;
  __shared__ bool took_last;
  const int unit = static_cast<int>(blockIdx.x);
  const ChosenRowsHead head = p.in.heads[unit];
  int32_t* const out = p.out.begins + unit * p.out.stride;
  if (head.rows <= p.wanted) {
    const int32_t* const in = p.in.begins + unit * p.in.stride;
    for (int i = threadIdx.x; i < head.count; i += kThreads) out[i] = in[i];
    if (threadIdx.x == 0) p.out.heads[unit] = head;
    return;
  }
  const Chunks chunks = ChunksOf(p, unit);
  const uint32_t* const scores = p.scores + unit * score_stride;
  if (threadIdx.x == 0) took_last = false;
  __syncthreads();
  const int last = chunks.count() - 1;
  const int count = SelectInBlock<kThreads>(
      chunks.count(), static_cast<int>(p.wanted / p.chunk),
      [&](int j) { return __ldg(scores + j); }, scratch,
      [&](int rank, int j) {
        out[rank] = chunks.At(j).begin;
        if (j == last) took_last = true;
      });
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int chunk = static_cast<int>(p.chunk);
  const int missing = took_last ? chunk - (head.rows - last * chunk) : 0;
  p.out.heads[unit] = {count, chunk, count * chunk - missing};
}

// Grid: units. A thread turns pairs of elements.
__global__ void __launch_bounds__(kThreads) GatherKernel(const BlockQueriesParams p, int queries) {
  const int unit = static_cast<int>(blockIdx.x), half = static_cast<int>(p.head_dim) / 2;
  const int64_t block = unit / p.kv_heads, head = unit % p.kv_heads;
  const int64_t last = p.layout.tokens(block) - 1, group = p.group;
  const int64_t stream = p.layout.first(block) - p.layout.zone_end(block) + 1;
  for (int i = threadIdx.x; i < queries * half; i += kThreads) {
    const int row = i / half, c = i % half;
    int64_t token = last - row / group * p.stride_q;
    if (token < 0) token = last;  // of a short block: once more
    const int64_t from =
        ((block * p.layout.block_q + token) * p.kv_heads * group + head * group + row % group) *
            p.head_dim +
        c;
    const int64_t to = (int64_t{unit} * queries + row) * p.head_dim + c;
    const uint32_t low = p.q[from], high = p.q[from + half];
    for (int side = 0; side < 2; ++side) {
      uint16_t* const out = side == 0 ? p.right : p.left;
      if (out == nullptr) continue;
      if (p.table.angles == nullptr) {
        out[to] = static_cast<uint16_t>(low);
        out[to + half] = static_cast<uint16_t>(high);
        continue;
      }
      const float* const cosines = AnglesAt(p.table, stream + side, half);
      float a = LowFloat(low), b = LowFloat(high);
      TurnPair(a, b, cosines[c], cosines[c + half]);
      const uint32_t turned = PackBf16(a, b);
      out[to] = static_cast<uint16_t>(turned);
      out[to + half] = static_cast<uint16_t>(turned >> 16);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    StartKernel(BlockLayout layout, int kv_heads, ChosenRows out) {
  const int64_t unit = int64_t{blockIdx.x} * kThreads + threadIdx.x, block = unit / kv_heads;
  if (block >= layout.blocks()) return;
  const auto rows = static_cast<int32_t>(layout.zone_rows(block));
  out.begins[unit * out.stride] = static_cast<int32_t>(layout.sink(block));
  out.heads[unit] = {rows > 0 ? 1 : 0, rows, rows};
}

bool Served(const BlockLayout& layout) {
  return layout.n >= 0 && layout.block_q >= 1 && layout.first_position % layout.block_q == 0 &&
         layout.sink_tokens >= 0 && layout.window >= 0 &&
         layout.first_position + layout.n < int64_t{1} << 30;
}

template <int kDim, bool kTurned>
cudaError_t Descend(const BlockPruneParams& p, cudaStream_t stream) {
  const int64_t tiles = (p.queries + 15) / 16, sides = p.left == nullptr ? 1 : 2;
  const auto shared = static_cast<size_t>(sides * tiles * Queries<kDim>::kTile) * sizeof(uint4);
  const auto kernel = DescendKernel<kDim, kTurned>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return error;
  const int64_t stride = ScoreStride(p);
  const dim3 grid(static_cast<unsigned>(p.layout.blocks() * p.kv_heads),
                  static_cast<unsigned>((stride + kBlockChunks - 1) / kBlockChunks));
  kernel<<<grid, kThreads, shared, stream>>>(p, stride);
  return cudaGetLastError();
}

}  // namespace

cudaError_t GatherBlockQueries(const BlockQueriesParams& p, cudaStream_t stream) {
  if (!Served(p.layout) || p.kv_heads < 1 || p.group < 1 || p.stride_q < 1 || p.head_dim % 2 != 0) {
    return cudaErrorInvalidValue;
  }
  if (p.layout.n == 0) return cudaSuccess;
  const int64_t queries = BlockQueries(p.layout.block_q, p.stride_q, p.group);
  GatherKernel<<<static_cast<unsigned>(p.layout.blocks() * p.kv_heads), kThreads, 0, stream>>>(
      p, static_cast<int>(queries));
  return cudaGetLastError();
}

cudaError_t StartBlockPrune(const BlockLayout& layout, int64_t kv_heads, const ChosenRows& out,
                            cudaStream_t stream) {
  if (!Served(layout) || kv_heads < 1 || out.stride < 1) return cudaErrorInvalidValue;
  if (layout.n == 0) return cudaSuccess;
  const int64_t units = layout.blocks() * kv_heads;
  StartKernel<<<static_cast<unsigned>((units + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      layout, static_cast<int>(kv_heads), out);
  return cudaGetLastError();
}

int64_t BlockPruneMostChunks(const BlockPruneParams& p) {
  // All stretches may go on as they are, if they hold few enough rows.
  return std::max(p.in.stride, p.wanted / p.chunk);
}

cudaError_t BlockPrune(const BlockPruneParams& p, cudaStream_t stream) {
  if (!Served(p.layout) || p.kv_heads < 1 || p.queries < 1 || p.queries > kMostQueries ||
      (p.head_dim != 64 && p.head_dim != 128) || p.chunk < 1 || p.wanted < p.chunk ||
      p.in.stride < 1 || p.out.stride < BlockPruneMostChunks(p) ||
      (p.table.angles != nullptr && (p.left != nullptr || p.table.positions < 1))) {
    return cudaErrorInvalidValue;
  }
  if (p.layout.n == 0) return cudaSuccess;
  if (p.max_rows > p.wanted) {
    const bool turned = p.table.angles != nullptr;
    const cudaError_t error =
        p.head_dim == 64
            ? (turned ? Descend<64, true>(p, stream) : Descend<64, false>(p, stream))
            : (turned ? Descend<128, true>(p, stream) : Descend<128, false>(p, stream));
    if (error != cudaSuccess) return error;
  }
  ChooseKernel<<<static_cast<unsigned>(p.layout.blocks() * p.kv_heads), kThreads, 0, stream>>>(
      p, ScoreStride(p));
  return cudaGetLastError();
}

}  // namespace carrel::kernels
