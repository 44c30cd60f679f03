// Rows of K and V that lie in pinned host memory, as they are or packed, copied to where attention
// reads them. A lane carries 16 bytes of a row's K or V, four rows at a time, so that the bus is full.
#pragma once

#include <algorithm>

#include "kernels/launch-inl.cuh"
#include "kernels/mma-inl.cuh"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/together-inl.cuh"

namespace carrel::kernels {

inline constexpr int kGatherWarps = 8;
inline constexpr int kGatherRows = 4;         // that a lane has in flight
inline constexpr int64_t kGatherBlocks = 64;  // of a launch, if all have some

struct GatherArgs {
  // Rows as they are, or packed.
  KvView from;
  PackedRows packed;
  // Of ids[head], [kv_heads, ids_stride], those at `picked`, or the first picked_count.
  const int32_t* ids;
  int64_t ids_stride;
  const int32_t* picked;        // [kv_heads, count] indices into ids; null: 0, 1, ...
  const int32_t* picked_count;  // [kv_heads]; null: count
  int count;
  // The row of ids[i] goes to row to[i] of to_rows.
  const int32_t* to;  // [kv_heads, count]; null: i
  KvRows to_rows;
};

// What a lane reads of row after row: 16 bytes of K or V of one KV head, beginning at element 8 part.
template <int kDim>
class PlainSource {
 public:
  using Loaded = uint4;
  __device__ PlainSource(const GatherArgs& a, int head, bool is_v, int part)
      : from_((is_v ? a.from.v : a.from.k) + head * a.from.row_stride * kDim +
              kPackedPiece * part) {}
  __device__ Loaded Load(int row) const {
    return LoadStream16(from_ + static_cast<int64_t>(row) * kDim);
  }
  __device__ uint4 Finish(const Loaded& loaded) const { return loaded; }

 private:
  const uint16_t* from_;
};

template <int kDim>
class PackedSource {
 public:
  struct Loaded {
    uint2 low;         // signs and mantissas
    uint32_t offsets;  // of exponents
  };
  __device__ PackedSource(const GatherArgs& a, int head, bool is_v, int part)
      : low_(a.packed.rows + head * a.packed.row_stride * kRowBytes + is_v * kDim +
             kPackedPiece * part),
        offsets_(a.packed.rows + head * a.packed.row_stride * kRowBytes + 2 * kDim +
                 is_v * kDim / 2 + kPackedPiece / 2 * part),
        exceptions_(a.packed.exceptions),
        top_(*reinterpret_cast<const uint2*>(a.packed.heads[head].top_exponent[is_v] +
                                             kPackedPiece * part)) {}

  __device__ Loaded Load(int row) const {
    const int64_t at = static_cast<int64_t>(row) * kRowBytes;
    return {LoadStream8(low_ + at), LoadStream4(offsets_ + at)};
  }

  __device__ uint4 Finish(const Loaded& x) const {
    // Offset 15 of what is no zero: an exception, and its number.
    if ((x.offsets & 15) == 15 && (x.low.x & 0x7f) != 0) {
      return LoadStream16(exceptions_ + x.low.y);
    }
    return {Pair(x.low.x, top_.x, x.offsets), Pair(x.low.x >> 16, top_.x >> 16, x.offsets >> 8),
            Pair(x.low.y, top_.y, x.offsets >> 16),
            Pair(x.low.y >> 16, top_.y >> 16, x.offsets >> 24)};
  }

 private:
  static constexpr int64_t kRowBytes = PackedRowBytes(kDim);

  // The lowest two bytes and offsets.
  __device__ static uint32_t Pair(uint32_t low, uint32_t top, uint32_t offsets) {
    return Element(low, top, offsets) | Element(low >> 8, top >> 8, offsets >> 4) << 16;
  }
  __device__ static uint32_t Element(uint32_t low, uint32_t top, uint32_t offset) {
    offset &= 15;
    const uint32_t exponent = offset == 15 ? 0 : (top & 255) - offset;
    return (low & 0x80) << 8 | exponent << 7 | (low & 0x7f);
  }

  const uint8_t* low_;
  const uint8_t* offsets_;
  const RowPiece* exceptions_;
  const uint2 top_;
};

// Grid: (blocks, kv_heads, sequences).
template <int kDim, class Source>
__global__ void __launch_bounds__(kGatherWarps * 32)
    GatherKernel(const __grid_constant__ Together<GatherArgs> all) {
  const GatherArgs& a = all.own();
  constexpr int kHalf = kDim / 8, kLanes = 2 * kHalf;    // lanes of a row: K, then V
  constexpr int kTogether = kGatherWarps * 32 / kLanes;  // rows of a block at once
  AllowNextLaunch();
  WaitForEarlierLaunch();
  const int head = blockIdx.y;
  const int count = a.picked_count == nullptr ? a.count : a.picked_count[head];
  const int part = threadIdx.x % kHalf, own = static_cast<int>(threadIdx.x) / kLanes;
  const bool is_v = threadIdx.x % kLanes >= kHalf;
  const int32_t* ids = a.ids + head * a.ids_stride;
  const int32_t* picked = a.picked == nullptr ? nullptr : a.picked + int64_t{head} * a.count;
  const int32_t* to = a.to == nullptr ? nullptr : a.to + int64_t{head} * a.count;
  const Source source(a, head, is_v, part);
  uint16_t* const to_rows =
      (is_v ? a.to_rows.v : a.to_rows.k) + head * a.to_rows.row_stride * kDim + 8 * part;
  const int step = static_cast<int>(gridDim.x) * kTogether;
  for (int first = static_cast<int>(blockIdx.x) * kTogether + own; first < count;
       first += step * kGatherRows) {
    int at[kGatherRows];
    typename Source::Loaded row[kGatherRows];
#pragma unroll
    for (int r = 0; r < kGatherRows; ++r) {
      const int j = first + r * step;
      at[r] = j >= count ? -1 : picked == nullptr ? j : picked[j];
    }
#pragma unroll
    for (int r = 0; r < kGatherRows; ++r) {
      if (at[r] >= 0) row[r] = source.Load(ids[at[r]]);
    }
#pragma unroll
    for (int r = 0; r < kGatherRows; ++r) {
      if (at[r] < 0) continue;
      const int64_t slot = to == nullptr ? at[r] : to[at[r]];
      *reinterpret_cast<uint4*>(to_rows + slot * kDim) = source.Finish(row[r]);
    }
  }
}

// What all sequences of a launch have in common.
struct GatherShape {
  int64_t kv_heads, head_dim;
  bool packed;
  bool operator==(const GatherShape&) const = default;
};

// Blocks of a KV head: a few fill the bus, whoever's they are.
inline int64_t GatherBlocks(const GatherShape& shape, int64_t most_rows, int64_t sequences) {
  const int64_t together = kGatherWarps * 32 / (shape.head_dim / 4) * kGatherRows;
  return std::clamp<int64_t>(kGatherBlocks / (shape.kv_heads * sequences), 1,
                             std::max<int64_t>(1, (most_rows + together - 1) / together));
}

// Packed rows if shape.packed; args(p): of each.
template <class Params, class Make>
cudaError_t LaunchGather(std::span<const Params> some, Make args, const GatherShape& shape,
                         cudaStream_t stream) {
  int64_t rows = 0;
  for (const Params& p : some) rows = std::max(rows, p.count);
  const auto sequences = static_cast<int64_t>(some.size());
  const auto kernel =
      shape.head_dim == 64
          ? (shape.packed ? GatherKernel<64, PackedSource<64>> : GatherKernel<64, PlainSource<64>>)
          : (shape.packed ? GatherKernel<128, PackedSource<128>>
                          : GatherKernel<128, PlainSource<128>>);
  return Launch({.grid = GridOf(GatherBlocks(shape, rows, sequences), shape.kv_heads, sequences),
                 .threads = kGatherWarps * 32,
                 .early = true},
                stream, kernel, TogetherOf(some, args));
}

}  // namespace carrel::kernels
