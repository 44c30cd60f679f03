// What:   small_blocks-inl.h for types with blocks of 256 values.
#if defined(CARREL_KERNELS_LARGE_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_LARGE_BLOCKS_INL_H_
#undef CARREL_KERNELS_LARGE_BLOCKS_INL_H_
#else
#define CARREL_KERNELS_LARGE_BLOCKS_INL_H_
#endif

#include <cstring>

#include "kernels/layer/dequantize/steps.h"
#include "kernels/layer/quantized_linear/block_tiles-inl.h"

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// The head of a block of Q4_K or Q5_K: two fp16 numbers, which scale 8 scales and 8 minima of 6 bits
// each in 12 bytes. Four of each lie in the low bits of the first 8 bytes; the others in the nibbles
// of the last 4 and the bits that are left.
struct SixBitScales {
  GroupVec scales, minima;
  HWY_INLINE explicit SixBitScales(const uint8_t* block) {
    const hn::FixedTag<uint8_t, 16> d8;
    const hn::FixedTag<uint32_t, 4> d32;
    // Dwords: the fp16 numbers, a, b and c. Those of low bits: a, c, b, c; of top ones: -, a, -, b.
    alignas(16) static constexpr uint8_t kLow[16] = {4, 5, 6,  7,  12, 13, 14, 15,
                                                     8, 9, 10, 11, 12, 13, 14, 15};
    alignas(16) static constexpr uint8_t kTop[16] = {128, 128, 128, 128, 4, 5, 6,  7,
                                                     128, 128, 128, 128, 8, 9, 10, 11};
    alignas(16) static constexpr uint32_t kShifts[4] = {0, 0, 0, 4};
    alignas(16) static constexpr uint32_t kMasks[4] = {0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f,
                                                       0x0f0f0f0f};
    const auto head = hn::LoadU(d8, block);
    const auto low = hn::BitCast(d32, hn::TableLookupBytes(head, hn::Load(d8, kLow)));
    const auto top = hn::BitCast(d32, hn::TableLookupBytesOr0(head, hn::Load(d8, kTop)));
    const auto six = hn::Or(hn::And(hn::Shr(low, hn::Load(d32, kShifts)), hn::Load(d32, kMasks)),
                            hn::And(hn::ShiftRight<2>(top), hn::Set(d32, 0x30303030u)));
    const hn::Half<decltype(d8)> half;
    const auto bytes = hn::BitCast(d8, six);
    const GroupTag d;
    const auto both = hn::PromoteTo(hn::FixedTag<float, 4>(),
                                    hn::BitCast(hn::FixedTag<hwy::float16_t, 4>(),
                                                hn::LowerHalf(hn::Half<decltype(d8)>(), head)));
    alignas(16) float numbers[4];
    hn::Store(both, hn::FixedTag<float, 4>(), numbers);
    scales = hn::Mul(hn::Set(d, numbers[0]), Widen(hn::LowerHalf(half, bytes)));
    minima = hn::Mul(hn::Set(d, -numbers[1]), Widen(hn::UpperHalf(half, bytes)));
  }
  static HWY_INLINE GroupVec Widen(hn::Vec<hn::FixedTag<uint8_t, 8>> bytes) {
    const hn::RebindToSigned<GroupTag> d32;
    return hn::ConvertTo(GroupTag(), hn::PromoteTo(d32, bytes));
  }
};

// A fp16 number, for every group.
HWY_INLINE GroupVec SetHalf(const uint8_t* at) {
  const hn::FixedTag<uint64_t, 1> d64;
  const hn::FixedTag<hwy::float16_t, 4> d16;
  const auto half = hn::BitCast(d16, hn::Set(d64, Load16(at)));
  return hn::Set(GroupTag(), hn::GetLane(hn::PromoteTo(hn::FixedTag<float, 4>(), half)));
}

// Two vectors of bytes: the even pieces of 16 bytes, and the odd ones.
HWY_INLINE void SplitPieces(const uint8_t* at, ByteVec& even, ByteVec& odd) {
  const ByteTag d;
  const ByteVec a = hn::LoadU(d, at), b = hn::LoadU(d, at + 4 * kLanes);
#if HWY_TARGET <= HWY_AVX3
  even = ByteVec{_mm512_shuffle_i32x4(a.raw, b.raw, _MM_SHUFFLE(2, 0, 2, 0))};
  odd = ByteVec{_mm512_shuffle_i32x4(a.raw, b.raw, _MM_SHUFFLE(3, 1, 3, 1))};
#else
  even = hn::ConcatLowerLower(d, b, a);
  odd = hn::ConcatUpperUpper(d, b, a);
#endif
}

// 16 bytes in every block, block b shifted to the right by shifts[4 b]; what a byte gets from the next
// one is for nobody.
HWY_INLINE BitsVec ShiftedPieces(const uint8_t* at, const uint32_t* shifts) {
  const hn::RebindToUnsigned<SumTag> d;
  const auto bytes = hn::BitCast(d, hn::LoadDup128(ByteTag(), at));
  return hn::BitCast(BitsTag(), hn::Shr(bytes, hn::Load(d, shifts)));
}

// Half a tile of bytes.
struct HalfTile {
  WordVec q[2];
  HWY_INLINE explicit HalfTile(BitsVec bytes) { Halves(bytes, q); }
};

struct Q4KProduct : BlockProduct<256, 144, WordOrder::kEvenOdd, true> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    const uint8_t* block = blocks.first;
    const SixBitScales six(block);
    taker.Scale(six.scales);
    taker.Minimum(six.minima);
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; tile += 2) {
      ByteVec first, last;  // 16 columns of low and of high groups
      SplitPieces(block + 16 + tile * 4 * kLanes, first, last);
      WordVec a[4], b[4];
      Quarters(first, a);
      Quarters(last, b);
      taker.Tile({a[0], a[1], b[0], b[1]}, tile);
      taker.Tile({a[2], a[3], b[2], b[3]}, tile + 1);
    }
  }
};

struct Q5KProduct : BlockProduct<256, 176, WordOrder::kEvenOdd, true> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    const BitsTag d;
    const uint8_t* block = blocks.first;
    const SixBitScales six(block);
    taker.Scale(six.scales);
    taker.Minimum(six.minima);
    // Bit g of a byte belongs to group g: two for each block of a vector.
    alignas(64) static constexpr uint32_t kShifts[16] = {0, 0, 0, 0, 2, 2, 2, 2,
                                                         4, 4, 4, 4, 6, 6, 6, 6};
    const BitsVec sixteen = hn::Set(d, uint16_t{0x1010});
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; tile += 2) {
      ByteVec first, last;
      SplitPieces(block + 48 + tile * 4 * kLanes, first, last);
      const uint32_t* shifts = kShifts + tile / 2 * kLanes % 16;
      const BitsVec a = hn::BitCast(d, first), a_bits = ShiftedPieces(block + 16, shifts);
      const BitsVec b = hn::BitCast(d, last), b_bits = ShiftedPieces(block + 32, shifts);
      const auto low = [&](BitsVec bytes, BitsVec bits) HWY_ATTR {
        return HalfTile(hn::Or(LowNibbles(bytes), hn::And(hn::ShiftLeft<4>(bits), sixteen)));
      };
      const auto high = [&](BitsVec bytes, BitsVec bits) HWY_ATTR {
        return HalfTile(hn::Or(HighNibbles(bytes), hn::And(hn::ShiftLeft<3>(bits), sixteen)));
      };
      const HalfTile low_a = low(a, a_bits), low_b = low(b, b_bits);
      taker.Tile({low_a.q[0], low_a.q[1], low_b.q[0], low_b.q[1]}, tile);
      const HalfTile high_a = high(a, a_bits), high_b = high(b, b_bits);
      taker.Tile({high_a.q[0], high_a.q[1], high_b.q[0], high_b.q[1]}, tile + 1);
    }
  }
};

// A scale of 8 bits for each 16 numbers, which count from -32.
struct Q6KProduct : BlockProduct<256, 210, WordOrder::kPairs, false, true> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    const BitsTag d;
    const uint8_t* block = blocks.first;
    taker.Scale(SetHalf(block + 208));
    taker.ScaleHalves(reinterpret_cast<const int8_t*>(block + 192));
    const BitsVec two = hn::Set(d, uint16_t{0x3030});
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; tile += 2) {
      ByteVec first, last;
      SplitPieces(block + tile * 4 * kLanes, first, last);
      const BitsVec a = hn::BitCast(d, first), b = hn::BitCast(d, last);
      BitsVec a_bits, b_bits;
      TopBits(block + 128 + tile / 2 * 32, a_bits, b_bits);
      const auto low = [&](BitsVec bytes, BitsVec bits) HWY_ATTR {
        return HalfTile(hn::Or(LowNibbles(bytes), hn::And(hn::ShiftLeft<4>(bits), two)));
      };
      const auto high = [&](BitsVec bytes, BitsVec bits) HWY_ATTR {
        return HalfTile(hn::Or(HighNibbles(bytes), hn::And(bits, two)));
      };
      const HalfTile low_a = low(a, a_bits), low_b = low(b, b_bits);
      taker.TileOfHalves({low_a.q[0], low_a.q[1], low_b.q[0], low_b.q[1]}, tile);
      const HalfTile high_a = high(a, a_bits), high_b = high(b, b_bits);
      taker.TileOfHalves({high_a.q[0], high_a.q[1], high_b.q[0], high_b.q[1]}, tile + 1);
    }
  }

 private:
  // Each 32 bytes hold two bits of each number of four groups: of those of low nibbles in the lowest
  // four bits of a byte. Groups 1 and 3 of the four come shifted to where those of 0 and 2 are.
  static HWY_INLINE void TopBits(const uint8_t* at, BitsVec& a, BitsVec& b) {
    const hn::RebindToUnsigned<SumTag> d;
    alignas(64) static constexpr uint32_t kShifts[16] = {0, 0, 0, 0, 2, 2, 2, 2,
                                                         0, 0, 0, 0, 2, 2, 2, 2};
#if HWY_TARGET <= HWY_AVX3
    const __m512i all = _mm512_loadu_si512(at);
    const auto shifts = hn::Load(d, kShifts);
    const auto shifted = [&](__m512i pieces) HWY_ATTR {
      return hn::BitCast(BitsTag(), hn::Shr(hn::Vec<decltype(d)>{pieces}, shifts));
    };
    a = shifted(_mm512_shuffle_i32x4(all, all, _MM_SHUFFLE(2, 2, 0, 0)));
    b = shifted(_mm512_shuffle_i32x4(all, all, _MM_SHUFFLE(3, 3, 1, 1)));
#else
    a = ShiftedPieces(at, kShifts);
    b = ShiftedPieces(at + 16, kShifts);
#endif
  }
};

// Groups lie as blocks of 32 values do: 16 bytes, low nibbles first.
struct Iq4XsProduct : BlockProduct<256, 136, WordOrder::kQuarters, false> {
  template <class Blocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks& blocks, Taker& taker) {
    const GroupTag d;
    const uint8_t* block = blocks.first;
    const hn::FixedTag<uint8_t, 8> d8;
    const auto bytes = hn::BitCast(d8, hn::Set(hn::FixedTag<uint64_t, 1>(), ScaleBytes(block)));
    const GroupVec from_zero = hn::Sub(SixBitScales::Widen(bytes), hn::Set(d, 32.0f));
    taker.Scale(hn::Mul(SetHalf(block), from_zero));
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; ++tile) {
      WordVec q[4];
      QuartersOfSteps(hn::LoadU(ByteTag(), block + 8 + tile * 4 * kLanes), kNormalSteps, q);
      taker.Tile(q, tile);
    }
  }

 private:
  // Eight scales of 6 bits, a byte each: their low nibbles lie side by side, and so do the pairs of
  // their high bits.
  static HWY_INLINE uint64_t ScaleBytes(const uint8_t* block) {
    uint32_t nibbles;
    std::memcpy(&nibbles, block + 4, sizeof(nibbles));
    uint64_t low = nibbles, high = Load16(block + 2);
    low = (low | low << 16) & 0x0000ffff0000ffff;
    low = (low | low << 8) & 0x00ff00ff00ff00ff;
    low = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
    high = (high | high << 24) & 0x000000ff000000ff;
    high = (high | high << 12) & 0x000f000f000f000f;
    high = (high | high << 6) & 0x0303030303030303;
    return low | high << 4;
  }
};

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
