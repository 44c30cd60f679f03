// Queries of a block stand side by side, q head by q head, 16 to a warp: all of them share the rows that
// their KV head chose, which are gathered through registers, turned there, and laid down as tiles.
#include "kernels/attention/block_sparse_attention/block_sparse_attention.h"
#include "kernels/flash_tile-inl.cuh"
#include "kernels/turn-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kKeys = kFlashKeys;

// The rows of a unit by their rank.
class UnitRows {
 public:
  __device__ UnitRows(const BlockSparseAttentionParams& p, int64_t block, int64_t unit)
      : head_(p.chosen.heads[unit]),
        begins_(p.chosen.begins + unit * p.chosen.stride),
        sink_(static_cast<int>(p.layout.sink(block))),
        zone_end_(static_cast<int>(p.layout.zone_end(block))),
        total_(sink_ + head_.rows +
               static_cast<int>(p.layout.first(block) + p.layout.tokens(block)) - zone_end_),
        shared_(max(0, total_ - static_cast<int>(p.table.positions))) {}

  __device__ int total() const { return total_; }
  // Where the row or query of a rank stands.
  __device__ int Position(int rank) const { return max(0, rank - shared_); }
  __device__ int At(int rank) const {
    if (rank < sink_) return rank;
    const int of_zone = rank - sink_;
    if (of_zone >= head_.rows) return zone_end_ + of_zone - head_.rows;
    if (head_.count == 1) return begins_[0] + of_zone;
    const int stretch = of_zone / head_.length;
    return begins_[stretch] + of_zone - stretch * head_.length;
  }

 private:
  const ChosenRowsHead head_;
  const int32_t* const begins_;
  const int sink_, zone_end_, total_;
  const int shared_;  // that stand where the first one does
};

// The next 64 rows of K and V on their way from memory to shared memory: a thread's share.
template <int D, int kThreads, bool kMoved>
class Fetch {
  static constexpr int kHalfPieces = D / 16;  // 16-byte pieces of half a row
  static constexpr int kUnits = kKeys * kHalfPieces;
  static constexpr int kShare = (kUnits + kThreads - 1) / kThreads;

 public:
  __device__ __forceinline__ void Load(const UnitRows& rows, const uint16_t* k, const uint16_t* v,
                                       int first) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads, rank = first + at / kHalfPieces;
      valid_[i] = at < kUnits && rank < rows.total();
      if (!valid_[i]) continue;
      const int64_t from = int64_t{rows.At(rank)} * D + at % kHalfPieces * 8;
      k_low_[i] = LoadStream16(k + from);
      k_high_[i] = LoadStream16(k + from + D / 2);
      v_low_[i] = LoadStream16(v + from);
      v_high_[i] = LoadStream16(v + from + D / 2);
    }
  }

  // Zeros where there is no row.
  __device__ __forceinline__ void Store(const UnitRows& rows, const TurnTable& table, int first,
                                        __nv_bfloat16* k_tile, __nv_bfloat16* v_tile) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kThreads;
      if (at >= kUnits) continue;
      const int row = at / kHalfPieces, piece = at % kHalfPieces * 8;
      const uint4 nothing = {0, 0, 0, 0};
      uint4 low = valid_[i] ? k_low_[i] : nothing, high = valid_[i] ? k_high_[i] : nothing;
      if (kMoved && valid_[i]) {
        const float* const cosines = AnglesAt(table, rows.Position(first + row), D / 2) + piece;
        Turn8(low, high, cosines, cosines + D / 2, 1);
      }
      Put(k_tile, row, piece, low);
      Put(k_tile, row, piece + D / 2, high);
      Put(v_tile, row, piece, valid_[i] ? v_low_[i] : nothing);
      Put(v_tile, row, piece + D / 2, valid_[i] ? v_high_[i] : nothing);
    }
  }

 private:
  __device__ __forceinline__ static void Put(__nv_bfloat16* tile, int row, int column, uint4 what) {
    *reinterpret_cast<uint4*>(tile + row * kFlashRow<D> + column) = what;
  }

  uint4 k_low_[kShare], k_high_[kShare], v_low_[kShare], v_high_[kShare];
  bool valid_[kShare];
};

// The queries of a block, of one KV head: number h * block_q + i is token i, q head h of the group.
template <int D, int kWarps, bool kMoved>
__device__ __forceinline__ void LoadQueries(const BlockSparseAttentionParams& p, int64_t block,
                                            int64_t kv_head, int first, const UnitRows& rows,
                                            __nv_bfloat16* tile) {
  constexpr int kHalfPieces = D / 16;
  const int first_rank = rows.total() - static_cast<int>(p.layout.tokens(block));
  for (int at = threadIdx.x; at < kWarps * 16 * kHalfPieces; at += kWarps * 32) {
    const int row = at / kHalfPieces, piece = at % kHalfPieces * 8;
    const int64_t h = (first + row) / p.layout.block_q, i = (first + row) % p.layout.block_q;
    uint4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
    if (h < p.group && i < p.layout.tokens(block)) {
      const int64_t q_head = kv_head * p.group + h;
      const uint16_t* const from =
          p.q + ((block * p.layout.block_q + i) * p.kv_heads * p.group + q_head) * D + piece;
      low = LoadStream16(from);
      high = LoadStream16(from + D / 2);
      if constexpr (kMoved) {
        const float* const cosines =
            AnglesAt(p.table, rows.Position(first_rank + static_cast<int>(i)), D / 2) + piece;
        Turn8(low, high, cosines, cosines + D / 2, 1);
      }
    }
    *reinterpret_cast<uint4*>(tile + row * kFlashRow<D> + piece) = low;
    *reinterpret_cast<uint4*>(tile + row * kFlashRow<D> + piece + D / 2) = high;
  }
}

template <int D, int kWarps>
constexpr int kSharedBytes = (kWarps * 16 + 2 * kKeys) * kFlashRow<D> * 2;

// Grid: (blocks, kv_heads, parts of a block's queries).
template <int D, int kWarps, bool kMoved>
__global__ void __launch_bounds__(kWarps * 32) AttendKernel(const BlockSparseAttentionParams p) {
  constexpr int kRow = kFlashRow<D>;
  extern __shared__ __align__(16) unsigned char shared[];
  __nv_bfloat16* const q_tile = reinterpret_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* const k_tile = q_tile + kWarps * 16 * kRow;
  __nv_bfloat16* const v_tile = k_tile + kKeys * kRow;

  const int64_t block = blockIdx.x, kv_head = blockIdx.y;
  const int first = static_cast<int>(blockIdx.z) * kWarps * 16;
  const UnitRows rows(p, block, block * p.kv_heads + kv_head);
  const int tokens = static_cast<int>(p.layout.tokens(block)), first_rank = rows.total() - tokens;
  const Bf16* const k = p.kv.k + kv_head * p.kv.row_stride * D;
  const Bf16* const v = p.kv.v + kv_head * p.kv.row_stride * D;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block_q = static_cast<int>(p.layout.block_q), of_warp = first + warp * 16;
  const bool at_work = of_warp < block_q * p.group;
  int h[2], token[2];  // of this lane's two queries
  int64_t sees[2];
  for (int r = 0; r < 2; ++r) {
    h[r] = (of_warp + lane / 4 + 8 * r) / block_q;
    token[r] = (of_warp + lane / 4 + 8 * r) % block_q;
    sees[r] = min(rows.total(), first_rank + token[r] + 1);
  }
  // Of one q head the warp's first query sees least; of several, a block's first token.
  const int least = block_q % 16 == 0 ? of_warp % block_q : 0;
  const int warp_sees_all = min(rows.total(), first_rank + least + 1);

  Fetch<D, kWarps * 32, kMoved> fetch;
  fetch.Load(rows, k, v, 0);
  LoadQueries<D, kWarps, kMoved>(p, block, kv_head, first, rows, q_tile);
  FlashTile<D> tile;
  const float scale = p.scale * FlashTile<D>::kLog2E;
  for (int key = 0; key < rows.total(); key += kKeys) {
    __syncthreads();  // the step before has read the tiles
    fetch.Store(rows, p.table, key, k_tile, v_tile);
    __syncthreads();
    if (key + kKeys < rows.total()) fetch.Load(rows, k, v, key + kKeys);
    if (!at_work) continue;
    tile.Step(q_tile + warp * 16 * kRow, k_tile, v_tile, key, sees, key + kKeys > warp_sees_all,
              scale);
  }
  tile.Finish();
  for (int r = 0; r < 2; ++r) {
    if (h[r] >= p.group || token[r] >= tokens) continue;
    const int64_t row = ((block * block_q + token[r]) * p.kv_heads + kv_head) * p.group + h[r];
    tile.Store(r, row * D, p.out, p.out_exact);
  }
}

template <int D, int kWarps, bool kMoved>
cudaError_t Launch(const BlockSparseAttentionParams& p, cudaStream_t stream) {
  const auto kernel = AttendKernel<D, kWarps, kMoved>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<D, kWarps>);
  if (error != cudaSuccess) return error;
  const int64_t queries = p.layout.block_q * p.group, of_part = kWarps * 16;
  const dim3 grid(static_cast<unsigned>(p.layout.blocks()), static_cast<unsigned>(p.kv_heads),
                  static_cast<unsigned>((queries + of_part - 1) / of_part));
  kernel<<<grid, kWarps * 32, kSharedBytes<D, kWarps>, stream>>>(p);
  return cudaGetLastError();
}

template <int D, bool kMoved>
cudaError_t LaunchBestFit(const BlockSparseAttentionParams& p, cudaStream_t stream) {
  // Least padding; among equals the fewest parts, each of which gathers all rows.
  const int64_t queries = p.layout.block_q * p.group;
  const auto padded = [&](int64_t warps) {
    return (queries + warps * 16 - 1) / (warps * 16) * warps * 16;
  };
  if (padded(12) <= padded(8) && padded(12) <= padded(4)) return Launch<D, 12, kMoved>(p, stream);
  return padded(8) <= padded(4) ? Launch<D, 8, kMoved>(p, stream) : Launch<D, 4, kMoved>(p, stream);
}

}  // namespace

cudaError_t BlockSparseAttention(const BlockSparseAttentionParams& p, cudaStream_t stream) {
  if (p.layout.n < 0 || p.layout.block_q < 1 || p.layout.first_position % p.layout.block_q != 0 ||
      p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 ||
      (p.head_dim != 64 && p.head_dim != 128) ||
      p.layout.first_position + p.layout.n >= int64_t{1} << 30) {
    return cudaErrorInvalidValue;
  }
  if (p.layout.n == 0) return cudaSuccess;
  const bool moved = p.table.angles != nullptr;
  if (p.head_dim == 64) {
    return moved ? LaunchBestFit<64, true>(p, stream) : LaunchBestFit<64, false>(p, stream);
  }
  return moved ? LaunchBestFit<128, true>(p, stream) : LaunchBestFit<128, false>(p, stream);
}

}  // namespace carrel::kernels
