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

// 8 scales and 8 minima of 6 bits each in 12 bytes (Q4_K, Q5_K): four of each lie in the low bits of
// the first 8 bytes; the others in the nibbles of the last 4 and the bits that are left.
struct SixBitScales {
  GroupVec scales, minima;
  HWY_INLINE explicit SixBitScales(const uint8_t* at) {
    uint32_t a, b, c;
    std::memcpy(&a, at, 4);
    std::memcpy(&b, at + 4, 4);
    std::memcpy(&c, at + 8, 4);
    const uint32_t low = 0x0f0f0f0f, top = 0x30303030, six = 0x3f3f3f3f;
    const uint64_t s = (a & six) | uint64_t{(c & low) | (a >> 2 & top)} << 32;
    const uint64_t m = (b & six) | uint64_t{(c >> 4 & low) | (b >> 2 & top)} << 32;
    scales = Widen(s);
    minima = Widen(m);
  }
  static HWY_INLINE GroupVec Widen(uint64_t bytes) {
    const hn::RebindToSigned<GroupTag> d32;
    const hn::FixedTag<uint64_t, 1> d64;
    const hn::FixedTag<uint8_t, 8> d8;
    return hn::ConvertTo(GroupTag(), hn::PromoteTo(d32, hn::BitCast(d8, hn::Set(d64, bytes))));
  }
};

HWY_INLINE GroupVec SetHalf(const uint8_t* at, float factor) {
  return hn::Set(GroupTag(),
                 factor * hn::GetLane(hn::PromoteTo(
                              hn::FixedTag<float, 4>(),
                              hn::BitCast(hn::FixedTag<hwy::float16_t, 4>(),
                                          hn::Set(hn::FixedTag<uint64_t, 1>(), Load16(at))))));
}

// 32 bytes; where a vector has 64, again and shifted to the right by two bits (of pairs of bytes).
HWY_INLINE BitsVec Shifted32(const uint8_t* at) {
#if HWY_TARGET <= HWY_AVX3
  const hn::Half<BitsTag> dh;
  const auto half = hn::BitCast(dh, hn::LoadU(hn::Repartition<uint8_t, decltype(dh)>(), at));
  return hn::Combine(BitsTag(), hn::ShiftRight<2>(half), half);
#else
  return hn::BitCast(BitsTag(), hn::LoadU(ByteTag(), at));
#endif
}

struct Q4KProduct {
  static constexpr int64_t kValues = 256, kBytes = 144;
  static constexpr WordOrder kOrder = WordOrder::kHalvesApart;
  static constexpr bool kMinimum = true, kFolded = false;
  template <int64_t kBlocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks<kBlocks>& blocks, Taker& taker) {
    const uint8_t* block = blocks.first;
    const SixBitScales six(block + 4);
    taker.Scale(hn::Mul(SetHalf(block, 1), six.scales));
    taker.Minimum(hn::Mul(SetHalf(block + 2, -1), six.minima));
    CARREL_UNROLL
    for (int64_t at = 0; at < 128 / (4 * kLanes); ++at) {
      WordVec q[4];
      Quarters(hn::LoadU(ByteTag(), block + 16 + at * 4 * kLanes), q);
      const WordVec low[2] = {q[0], q[1]}, high[2] = {q[2], q[3]};
      taker.template Tile<WordOrder::kHalvesApart>(low, 2 * at);
      taker.template Tile<WordOrder::kHalvesApart>(high, 2 * at + 1);
    }
  }
};

struct Q5KProduct {
  static constexpr int64_t kValues = 256, kBytes = 176;
  static constexpr WordOrder kOrder = WordOrder::kHalvesApart;
  static constexpr bool kMinimum = true, kFolded = false;
  template <int64_t kBlocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks<kBlocks>& blocks, Taker& taker) {
    const BitsTag d;
    const uint8_t* block = blocks.first;
    const SixBitScales six(block + 4);
    taker.Scale(hn::Mul(SetHalf(block, 1), six.scales));
    taker.Minimum(hn::Mul(SetHalf(block + 2, -1), six.minima));
    // Bit g of a byte belongs to group g; the lowest two to those of this tile and of the next.
    BitsVec bits = Shifted32(block + 16);
    const BitsVec sixteen = hn::Set(d, uint16_t{0x1010});
    CARREL_UNROLL
    for (int64_t at = 0; at < 128 / (4 * kLanes); ++at) {
      const BitsVec nibbles = hn::BitCast(d, hn::LoadU(ByteTag(), block + 48 + at * 4 * kLanes));
      WordVec low[2], high[2];
      Halves(hn::Or(LowNibbles(nibbles), hn::And(hn::ShiftLeft<4>(bits), sixteen)), low);
      Halves(hn::Or(HighNibbles(nibbles), hn::And(hn::ShiftLeft<3>(bits), sixteen)), high);
      taker.template Tile<WordOrder::kHalvesApart>(low, 2 * at);
      taker.template Tile<WordOrder::kHalvesApart>(high, 2 * at + 1);
      bits = hn::ShiftRight<kLanes / 4>(bits);
    }
  }
};

// 16 scales, of 16 numbers each, in two vectors.
struct Q6KProduct {
  static constexpr int64_t kValues = 256, kBytes = 210;
  static constexpr WordOrder kOrder = WordOrder::kHalves;
  static constexpr bool kMinimum = false, kFolded = true;
  template <int64_t kBlocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks<kBlocks>& blocks, Taker& taker) {
    const BitsTag d;
    const uint8_t* block = blocks.first;
    taker.ScaleHalves(SetHalf(block + 208, 1), reinterpret_cast<const int8_t*>(block + 192), 32);
    const BitsVec two = hn::Set(d, uint16_t{0x3030});
    CARREL_UNROLL
    for (int64_t at = 0; at < 128 / (4 * kLanes); ++at) {
      const BitsVec nibbles = hn::BitCast(d, hn::LoadU(ByteTag(), block + at * 4 * kLanes));
#if HWY_TARGET <= HWY_AVX3
      const BitsVec bits = Shifted32(block + 128 + 32 * at);
      const int64_t low_tile = 2 * at, high_tile = 2 * at + 1;
#else
      BitsVec bits = Shifted32(block + 128 + at / 2 * 32);
      if (at % 2 == 1) bits = hn::ShiftRight<2>(bits);
      const int64_t low_tile = at / 2 * 4 + at % 2, high_tile = low_tile + 2;
#endif
      WordVec low[2], high[2];
      Halves(hn::Or(LowNibbles(nibbles), hn::And(hn::ShiftLeft<4>(bits), two)), low);
      Halves(hn::Or(HighNibbles(nibbles), hn::And(bits, two)), high);
      taker.TileOfHalves(low, low_tile);
      taker.TileOfHalves(high, high_tile);
    }
  }
};

// Groups lie as blocks of 32 values do: 16 bytes, low nibbles first.
struct Iq4XsProduct {
  static constexpr int64_t kValues = 256, kBytes = 136;
  static constexpr WordOrder kOrder = WordOrder::kQuarters;
  static constexpr bool kMinimum = false, kFolded = false;
  template <int64_t kBlocks, class Taker>
  static CARREL_VNNI_ATTR HWY_INLINE void ReadChunk(const Blocks<kBlocks>& blocks, Taker& taker) {
    const GroupTag d;
    const uint8_t* block = blocks.first;
    const GroupVec from_zero = hn::Sub(SixBitScales::Widen(ScaleBytes(block)), hn::Set(d, 32.0f));
    taker.Scale(hn::Mul(SetHalf(block, 1), from_zero));
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; ++tile) {
      WordVec q[4];
      QuartersOfSteps(hn::LoadU(ByteTag(), block + 8 + tile * 4 * kLanes), kNormalSteps, q);
      taker.template Tile<WordOrder::kQuarters>(q, tile);
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
