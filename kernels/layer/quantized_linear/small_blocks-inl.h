// What:   inner products of quantised rows, as they lie, with packed inputs: one struct per type with
//         blocks of 32 values.
// Math:   of a chunk of 256 numbers: sum_g d_g scale_g sum_c q[c] word[c] + m_g sums_g, where a type
//         that counts from -8 or -16 has this times d as its m. Sums of q * word are exact.
// Cost:   AVX-512 with VNNI: some 20 instructions per 128 weights of 4 bits.
#if defined(CARREL_KERNELS_SMALL_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_SMALL_BLOCKS_INL_H_
#undef CARREL_KERNELS_SMALL_BLOCKS_INL_H_
#else
#define CARREL_KERNELS_SMALL_BLOCKS_INL_H_
#endif

#include "kernels/layer/dequantize/steps.h"
#include "kernels/layer/quantized_linear/block_tiles-inl.h"

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// Each type: ReadChunk gives 256 of a row's numbers to a taker (RowSums, row_sums-inl.h).
struct Q4_0Product : BlockProduct<32, 18, WordOrder::kQuarters, true> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    const GroupVec d = blocks.template Halves<0>();
    taker.Scale(d);
    taker.Minimum(hn::Mul(d, hn::Set(GroupTag(), -8.0f)));
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; ++tile) {
      if (blocks.EndBefore(tile, taker)) break;
      WordVec q[4];
      Quarters(blocks.Pieces16(tile, 2), q);
      taker.Tile(q, tile);
    }
  }
};

struct Q4_1Product : BlockProduct<32, 20, WordOrder::kQuarters, true> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    GroupVec d, m;
    blocks.template HalfPairs<0>(d, m);
    taker.Scale(d);
    taker.Minimum(m);
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; ++tile) {
      if (blocks.EndBefore(tile, taker)) break;
      WordVec q[4];
      Quarters(blocks.Pieces16(tile, 4), q);
      taker.Tile(q, tile);
    }
  }
};

// Q5_0 and Q5_1: 32 bits at byte kHigh are the fifth bits of a block's values, 16 bytes of nibbles
// follow.
template <int64_t kHigh, class Blocks, class Taker>
CARREL_VNNI_ATTR HWY_INLINE void TakeFiveBits(const Blocks& blocks, Taker& taker) {
  const ByteTag d;
  alignas(16) static constexpr uint8_t kBytesOfBits[32] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1,
                                                           1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2,
                                                           2, 2, 3, 3, 3, 3, 3, 3, 3, 3};
  const ByteVec low = hn::LoadDup128(d, kBytesOfBits), high = hn::LoadDup128(d, kBytesOfBits + 16);
  const ByteVec bit =
      hn::BitCast(d, hn::Set(hn::Repartition<uint64_t, ByteTag>(), uint64_t{0x8040201008040201}));
  const auto fifth = [&](ByteVec bits, ByteVec bytes) HWY_ATTR {
    const ByteVec here = hn::TableLookupBytes(bits, bytes);
    return hn::BitCast(BitsTag(),
                       hn::IfThenElseZero(hn::TestBit(here, bit), hn::Set(d, uint8_t{16})));
  };
  CARREL_UNROLL
  for (int64_t tile = 0; tile < 32 / kLanes; ++tile) {
    if (blocks.EndBefore(tile, taker)) break;
    const ByteVec bits = blocks.Words32(tile, kHigh);
    const BitsVec nibbles = hn::BitCast(BitsTag(), blocks.Pieces16(tile, kHigh + 4));
    WordVec q[4];
    Halves(hn::Or(LowNibbles(nibbles), fifth(bits, low)), q);
    Halves(hn::Or(HighNibbles(nibbles), fifth(bits, high)), q + 2);
    taker.Tile(q, tile);
  }
}

struct Q5_0Product : BlockProduct<32, 22, WordOrder::kQuarters, true> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    const GroupVec d = blocks.template Halves<0>();
    taker.Scale(d);
    taker.Minimum(hn::Mul(d, hn::Set(GroupTag(), -16.0f)));
    TakeFiveBits<2>(blocks, taker);
  }
};

struct Q5_1Product : BlockProduct<32, 24, WordOrder::kQuarters, true> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    GroupVec d, m;
    blocks.template HalfPairs<0>(d, m);
    taker.Scale(d);
    taker.Minimum(m);
    TakeFiveBits<4>(blocks, taker);
  }
};

struct Q8_0Product : BlockProduct<32, 34, WordOrder::kQuarters, false> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    taker.Scale(blocks.template Halves<0>());
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; ++tile) {
      if (blocks.EndBefore(tile, taker)) break;
      ByteVec low, high;
      blocks.Pieces32(tile, 2, low, high);
      WordVec q[4];
      SignedHalves(low, q);
      SignedHalves(high, q + 2);
      taker.Tile(q, tile);
    }
  }
};

// Blocks of a scale and, from byte kNibbles on, 16 bytes of nibbles that name steps of a table.
template <int64_t kNibbles, class Blocks, class Taker>
CARREL_VNNI_ATTR HWY_INLINE void TakeSteps(const Blocks& blocks, GroupVec d, const int8_t* steps,
                                           Taker& taker) {
  taker.Scale(d);
  CARREL_UNROLL
  for (int64_t tile = 0; tile < 32 / kLanes; ++tile) {
    if (blocks.EndBefore(tile, taker)) break;
    WordVec q[4];
    QuartersOfSteps(blocks.Pieces16(tile, kNibbles), steps, q);
    taker.Tile(q, tile);
  }
}

struct Iq4NlProduct : BlockProduct<32, 18, WordOrder::kQuarters, false> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    TakeSteps<2>(blocks, blocks.template Halves<0>(), kNormalSteps, taker);
  }
};

struct Mxfp4Product : BlockProduct<32, 17, WordOrder::kQuarters, false> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    TakeSteps<1>(blocks, blocks.Powers(0), kFloat4Steps, taker);
  }
};

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
