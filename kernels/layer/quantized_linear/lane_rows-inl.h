// What:   rows of blocks become the words of a panel (word_panel-inl.h), a row to a lane: a vector of
//         rows at a time, one function per type.
// Shapes: 16 bytes of each row are transposed as four dwords of all rows. A dword of bytes c, c + 1,
//         c + 2, c + 3 becomes two pairs of words without a change of lane: (c, c + 2) and
//         (c + 1, c + 3), which are pairs of quarters (packed_input-inl.h).
// Cost:   AVX-512: some 80 instructions for 512 numbers of 4 bits, of which 16 store.
#if defined(CARREL_KERNELS_LANE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_LANE_ROWS_INL_H_
#undef CARREL_KERNELS_LANE_ROWS_INL_H_
#else
#define CARREL_KERNELS_LANE_ROWS_INL_H_
#endif

#include <cstring>

#include "kernels/layer/dequantize/steps.h"
#include "kernels/layer/quantized_linear/large_blocks-inl.h"
#include "kernels/layer/quantized_linear/small_blocks-inl.h"

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

using DwordTag = hn::RebindToUnsigned<SumTag>;
using DwordVec = hn::Vec<DwordTag>;

inline constexpr int64_t kPanelOut = 2 * kLanes;  // rows of a panel
inline constexpr int64_t kPairs = 16;             // of words in a group

// Where a vector of rows puts a group: its pairs, scales and minima.
struct GroupPlace {
  int16_t* words;
  float* scales;
  float* minima;

  // Pair `pair` of quarter `quarter`.
  HWY_INLINE void Put(int64_t quarter, int64_t pair, WordVec words_of_rows) const {
    hn::StoreU(words_of_rows, WordTag(), words + (quarter * 4 + pair) * kPanelOut * 2);
  }
  HWY_INLINE void Put(int64_t quarter, int64_t pair, BitsVec words_of_rows) const {
    Put(quarter, pair, hn::BitCast(WordTag(), words_of_rows));
  }
  HWY_INLINE void Scale(FloatVec d) const { hn::StoreU(d, FloatTag(), scales); }
  HWY_INLINE void Minimum(FloatVec m) const { hn::StoreU(m, FloatTag(), minima); }
};

// A vector of rows, one to a lane, at the block that is read.
struct LaneRows {
  const uint8_t* at[kLanes];

  HWY_INLINE auto Bytes16(int64_t row, int64_t offset) const {
    return hn::LoadU(hn::FixedTag<uint8_t, 16>(), at[row] + offset);
  }
  // Rows `row`, row + 4, ..: 16 bytes of each.
  HWY_INLINE ByteVec Every4th(int64_t row, int64_t offset) const {
    const hn::FixedTag<uint8_t, 32> d2;
    const auto low = hn::Combine(d2, Bytes16(row + 4, offset), Bytes16(row, offset));
#if HWY_TARGET <= HWY_AVX3
    const auto high = hn::Combine(d2, Bytes16(row + 12, offset), Bytes16(row + 8, offset));
    return hn::Combine(ByteTag(), high, low);
#else
    return low;
#endif
  }
  // Dwords 0, 1, 2, 3 of 16 bytes.
  HWY_INLINE void Dwords(int64_t offset, BitsVec* out) const {
    const DwordTag d;
    const hn::RepartitionToWide<DwordTag> dw;
    const auto four = [&](int64_t row) HWY_ATTR { return hn::BitCast(d, Every4th(row, offset)); };
    const DwordVec a = four(0), b = four(1), c = four(2), e = four(3);
    const auto ab_low = hn::BitCast(dw, hn::InterleaveLower(d, a, b));
    const auto ab_high = hn::BitCast(dw, hn::InterleaveUpper(d, a, b));
    const auto ce_low = hn::BitCast(dw, hn::InterleaveLower(d, c, e));
    const auto ce_high = hn::BitCast(dw, hn::InterleaveUpper(d, c, e));
    out[0] = hn::BitCast(BitsTag(), hn::InterleaveLower(dw, ab_low, ce_low));
    out[1] = hn::BitCast(BitsTag(), hn::InterleaveUpper(dw, ab_low, ce_low));
    out[2] = hn::BitCast(BitsTag(), hn::InterleaveLower(dw, ab_high, ce_high));
    out[3] = hn::BitCast(BitsTag(), hn::InterleaveUpper(dw, ab_high, ce_high));
  }
  // 2 bytes of each row (4 with kBytes = 4), the lowest of a dword.
  template <int kBytes>
  HWY_INLINE void Gather(int64_t offset, uint32_t* out) const {
    CARREL_UNROLL
    for (int64_t r = 0; r < kLanes; ++r) {
      uint32_t bits = 0;
      std::memcpy(&bits, at[r] + offset, kBytes);
      out[r] = bits;
    }
  }
};

template <int kBits>
HWY_INLINE BitsVec RightInDwords(BitsVec bits) {
  return hn::BitCast(BitsTag(), hn::ShiftRight<kBits>(hn::BitCast(DwordTag(), bits)));
}

// The fp16 number in the low half of each dword.
HWY_INLINE FloatVec LowHalves(BitsVec dwords) {
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::Rebind<hwy::float16_t, FloatTag> df16;
  const DwordTag d;
  const DwordVec low = hn::And(hn::BitCast(d, dwords), hn::Set(d, 0xffffu));
  return hn::PromoteTo(FloatTag(), hn::BitCast(df16, hn::TruncateTo(d16, low)));
}
HWY_INLINE FloatVec HighHalves(BitsVec dwords) { return LowHalves(RightInDwords<16>(dwords)); }

// The low six bits of each dword (or whatever is left there) as numbers.
HWY_INLINE FloatVec Numbers(DwordVec dwords) {
  return hn::ConvertTo(FloatTag(), hn::BitCast(SumTag(), dwords));
}

// Bytes of both quarters of half a group.
template <class Group>
HWY_INLINE void PutBytes(const Group& place, int64_t half, int64_t pair, BitsVec bytes) {
  WordVec q[2];
  Halves(bytes, q);
  place.Put(2 * half, pair, q[0]);
  place.Put(2 * half + 1, pair, q[1]);
}
template <class Group>
HWY_INLINE void PutSigned(const Group& place, int64_t half, int64_t pair, BitsVec bytes) {
  WordVec q[2];
  SignedHalves(hn::BitCast(ByteTag(), bytes), q);
  place.Put(2 * half, pair, q[0]);
  place.Put(2 * half + 1, pair, q[1]);
}

// 16 bytes of nibbles: the low ones are the first half of a group.
template <class Group>
HWY_INLINE void PutNibbles(const LaneRows& rows, int64_t offset, const Group& place) {
  BitsVec dwords[4];
  rows.Dwords(offset, dwords);
  CARREL_UNROLL
  for (int64_t k = 0; k < 4; ++k) {
    WordVec q[4];
    Quarters(hn::BitCast(ByteTag(), dwords[k]), q);
    CARREL_UNROLL
    for (int64_t i = 0; i < 4; ++i) place.Put(i, k, q[i]);
  }
}

// The same, as names of a table's steps.
template <class Group>
HWY_INLINE void PutSteps(const LaneRows& rows, int64_t offset, const int8_t* steps,
                         const Group& place) {
  BitsVec dwords[4];
  rows.Dwords(offset, dwords);
  CARREL_UNROLL
  for (int64_t k = 0; k < 4; ++k) {
    WordVec q[4];
    QuartersOfSteps(hn::BitCast(ByteTag(), dwords[k]), steps, q);
    CARREL_UNROLL
    for (int64_t i = 0; i < 4; ++i) place.Put(i, k, q[i]);
  }
}

// Byte kByte of each dword, four times.
template <int kByte>
HWY_INLINE ByteVec RepeatByte(BitsVec dwords) {
  alignas(16) static constexpr uint8_t kFrom[16] = {
      kByte,     kByte,     kByte,     kByte,     kByte + 4,  kByte + 4,  kByte + 4,  kByte + 4,
      kByte + 8, kByte + 8, kByte + 8, kByte + 8, kByte + 12, kByte + 12, kByte + 12, kByte + 12};
  const ByteTag d;
  return hn::TableLookupBytes(hn::BitCast(d, dwords), hn::LoadDup128(d, kFrom));
}

// Nibbles with the fifth bits of 32 columns in `bits`.
template <int64_t kByte, class Group>
HWY_INLINE void PutFiveBits(const BitsVec (&nibbles)[4], BitsVec bits, const Group& place) {
  const ByteTag d;
  const ByteVec eight = RepeatByte<kByte>(bits);
  const auto fifth = [&](uint32_t mask) HWY_ATTR {
    const ByteVec bit = hn::BitCast(d, hn::Set(DwordTag(), mask));
    return hn::BitCast(BitsTag(),
                       hn::IfThenElseZero(hn::TestBit(eight, bit), hn::Set(d, uint8_t{16})));
  };
  constexpr int64_t kHalf = kByte / 2, kFirst = kByte % 2 * 2;
  const auto four = [&](int64_t k) HWY_ATTR {
    return kHalf == 0 ? LowNibbles(nibbles[k]) : HighNibbles(nibbles[k]);
  };
  PutBytes(place, kHalf, kFirst, hn::Or(four(kFirst), fifth(0x08040201)));
  PutBytes(place, kHalf, kFirst + 1, hn::Or(four(kFirst + 1), fifth(0x80402010)));
}

// Fifth bits at kHigh, nibbles after them.
template <int64_t kHigh, class Group>
HWY_INLINE void PutFiveBits(const LaneRows& rows, int64_t offset, const Group& place) {
  BitsVec nibbles[4];
  rows.Dwords(offset + kHigh + 4, nibbles);
  alignas(64) uint32_t high[kLanes];
  rows.Gather<4>(offset + kHigh, high);
  const BitsVec bits = hn::BitCast(BitsTag(), hn::Load(DwordTag(), high));
  PutFiveBits<0>(nibbles, bits, place);
  PutFiveBits<1>(nibbles, bits, place);
  PutFiveBits<2>(nibbles, bits, place);
  PutFiveBits<3>(nibbles, bits, place);
}

// Each type: FillChunk(rows, groups, place) reads `groups` groups of 32 columns, at most 8, from where
// rows stand. place(g): that of group g of them.

// Blocks of 32. The numbers at their beginnings are gathered for all of them first: what has just
// been stored in pieces cannot be loaded as a whole without waiting.
template <int kBytes, int64_t kBlockBytes, class Put>
HWY_INLINE void FillSmall(const LaneRows& rows, int64_t groups, const Put& put) {
  alignas(64) uint32_t heads[kChunkGroups][kLanes];
  for (int64_t g = 0; g < groups; ++g) rows.Gather<kBytes>(g * kBlockBytes, heads[g]);
  for (int64_t g = 0; g < groups; ++g) {
    put(g, g * kBlockBytes, hn::BitCast(BitsTag(), hn::Load(DwordTag(), heads[g])));
  }
}

template <class Place>
HWY_INLINE void FillChunk(Q4_0Product, const LaneRows& rows, int64_t groups, const Place& place) {
  FillSmall<2, 18>(rows, groups, [&](int64_t g, int64_t offset, BitsVec head) HWY_ATTR {
    const auto to = place(g);
    const FloatVec d = LowHalves(head);
    to.Scale(d);
    to.Minimum(hn::Mul(d, hn::Set(FloatTag(), -8.0f)));
    PutNibbles(rows, offset + 2, to);
  });
}

template <class Place>
HWY_INLINE void FillChunk(Q4_1Product, const LaneRows& rows, int64_t groups, const Place& place) {
  FillSmall<4, 20>(rows, groups, [&](int64_t g, int64_t offset, BitsVec head) HWY_ATTR {
    const auto to = place(g);
    to.Scale(LowHalves(head));
    to.Minimum(HighHalves(head));
    PutNibbles(rows, offset + 4, to);
  });
}

template <class Place>
HWY_INLINE void FillChunk(Q5_0Product, const LaneRows& rows, int64_t groups, const Place& place) {
  FillSmall<2, 22>(rows, groups, [&](int64_t g, int64_t offset, BitsVec head) HWY_ATTR {
    const auto to = place(g);
    const FloatVec d = LowHalves(head);
    to.Scale(d);
    to.Minimum(hn::Mul(d, hn::Set(FloatTag(), -16.0f)));
    PutFiveBits<2>(rows, offset, to);
  });
}

template <class Place>
HWY_INLINE void FillChunk(Q5_1Product, const LaneRows& rows, int64_t groups, const Place& place) {
  FillSmall<4, 24>(rows, groups, [&](int64_t g, int64_t offset, BitsVec head) HWY_ATTR {
    const auto to = place(g);
    to.Scale(LowHalves(head));
    to.Minimum(HighHalves(head));
    PutFiveBits<4>(rows, offset, to);
  });
}

template <class Place>
HWY_INLINE void FillChunk(Q8_0Product, const LaneRows& rows, int64_t groups, const Place& place) {
  FillSmall<2, 34>(rows, groups, [&](int64_t g, int64_t offset, BitsVec head) HWY_ATTR {
    const auto to = place(g);
    to.Scale(LowHalves(head));
    for (int64_t half = 0; half < 2; ++half) {
      BitsVec bytes[4];
      rows.Dwords(offset + 2 + 16 * half, bytes);
      CARREL_UNROLL
      for (int64_t k = 0; k < 4; ++k) PutSigned(to, half, k, bytes[k]);
    }
  });
}

template <class Place>
HWY_INLINE void FillChunk(Iq4NlProduct, const LaneRows& rows, int64_t groups, const Place& place) {
  FillSmall<2, 18>(rows, groups, [&](int64_t g, int64_t offset, BitsVec head) HWY_ATTR {
    const auto to = place(g);
    to.Scale(LowHalves(head));
    PutSteps(rows, offset + 2, kNormalSteps, to);
  });
}

template <class Place>
HWY_INLINE void FillChunk(Mxfp4Product, const LaneRows& rows, int64_t groups, const Place& place) {
  FillSmall<1, 17>(rows, groups, [&](int64_t g, int64_t offset, BitsVec head) HWY_ATTR {
    const auto to = place(g);
    to.Scale(PowerOfTwo(FloatTag(), hn::BitCast(SumTag(), head)));
    PutSteps(rows, offset + 1, kFloat4Steps, to);
  });
}

// Field g of 8 in 12 bytes of six-bit numbers (SixBitScales): `low` holds the first four fields, and
// in its top bits those of the others, whose low nibbles are `nibbles`.
HWY_INLINE FloatVec SixBits(DwordVec low, DwordVec nibbles, int64_t g) {
  const DwordTag d;
  const int shift = static_cast<int>(8 * (g % 4));
  const auto byte = [&](DwordVec v) HWY_ATTR { return hn::ShiftRightSame(v, shift); };
  if (g < 4) return Numbers(hn::And(byte(low), hn::Set(d, 63u)));
  return Numbers(hn::Or(hn::And(byte(nibbles), hn::Set(d, 15u)),
                        hn::And(hn::ShiftRight<2>(byte(low)), hn::Set(d, 48u))));
}

// d, the negative of dmin and the scales of Q4_K and Q5_K.
template <class Place>
HWY_INLINE void PutSixBitScales(const LaneRows& rows, const Place& place) {
  const DwordTag du;
  BitsVec head[4];
  rows.Dwords(0, head);
  const FloatVec d = LowHalves(head[0]), m = hn::Neg(HighHalves(head[0]));
  const DwordVec scales = hn::BitCast(du, head[1]), minima = hn::BitCast(du, head[2]);
  const DwordVec others = hn::BitCast(du, head[3]);
  for (int64_t g = 0; g < kChunkGroups; ++g) {
    const auto to = place(g);
    to.Scale(hn::Mul(d, SixBits(scales, others, g)));
    to.Minimum(hn::Mul(m, SixBits(minima, hn::ShiftRight<4>(others), g)));
  }
}

template <class Place>
HWY_INLINE void FillChunk(Q4KProduct, const LaneRows& rows, int64_t /*groups*/,
                          const Place& place) {
  PutSixBitScales(rows, place);
  for (int64_t g = 0; g < kChunkGroups; g += 2) {
    const auto low = place(g), high = place(g + 1);
    for (int64_t half = 0; half < 2; ++half) {
      BitsVec dwords[4];
      rows.Dwords(16 + 16 * (g + half), dwords);
      CARREL_UNROLL
      for (int64_t k = 0; k < 4; ++k) {
        WordVec q[4];
        Quarters(hn::BitCast(ByteTag(), dwords[k]), q);
        low.Put(2 * half, k, q[0]);
        low.Put(2 * half + 1, k, q[1]);
        high.Put(2 * half, k, q[2]);
        high.Put(2 * half + 1, k, q[3]);
      }
    }
  }
}

template <class Place>
HWY_INLINE void FillChunk(Q5KProduct, const LaneRows& rows, int64_t /*groups*/,
                          const Place& place) {
  PutSixBitScales(rows, place);
  const BitsVec sixteen = hn::Set(BitsTag(), uint16_t{0x1010});
  for (int64_t half = 0; half < 2; ++half) {
    // Bit g of a byte belongs to group g.
    BitsVec fifth[4];
    rows.Dwords(16 + 16 * half, fifth);
    for (int64_t g = 0; g < kChunkGroups; g += 2) {
      const auto low = place(g), high = place(g + 1);
      BitsVec dwords[4];
      rows.Dwords(48 + 16 * (g + half), dwords);
      CARREL_UNROLL
      for (int64_t k = 0; k < 4; ++k) {
        PutBytes(low, half, k,
                 hn::Or(LowNibbles(dwords[k]), hn::And(hn::ShiftLeft<4>(fifth[k]), sixteen)));
        PutBytes(high, half, k,
                 hn::Or(HighNibbles(dwords[k]), hn::And(hn::ShiftLeft<3>(fifth[k]), sixteen)));
        fifth[k] = hn::ShiftRight<2>(fifth[k]);
      }
    }
  }
}

// Both quarters of half a group of Q6_K: numbers from -32 on times the half's scale.
template <class Group>
HWY_INLINE void PutFolded(const Group& place, int64_t half, int64_t pair, BitsVec bytes,
                          WordVec scale) {
  const WordVec middle = hn::Set(WordTag(), int16_t{32});
  WordVec q[2];
  Halves(bytes, q);
  place.Put(2 * half, pair, hn::Mul(hn::Sub(q[0], middle), scale));
  place.Put(2 * half + 1, pair, hn::Mul(hn::Sub(q[1], middle), scale));
}

template <class Place>
HWY_INLINE void FillChunk(Q6KProduct, const LaneRows& rows, int64_t /*groups*/,
                          const Place& place) {
  alignas(64) uint32_t steps[kLanes];
  rows.Gather<2>(208, steps);
  BitsVec scales[4];
  rows.Dwords(192, scales);
  const BitsVec two = hn::Set(BitsTag(), uint16_t{0x3030});
  // Bytes 2 g and 2 g + 1 of the scales are those of group g: the one of a half as words.
  const auto scale = [&](int64_t g, int64_t half) HWY_ATTR {
    const DwordTag d;
    const DwordVec four = hn::BitCast(d, scales[g / 2]);
    const DwordVec top = hn::ShiftLeftSame(four, static_cast<int>(24 - 8 * (g % 2 * 2 + half)));
    const SumVec number = hn::ShiftRight<24>(hn::BitCast(SumTag(), top));
    const BitsVec low =
        hn::And(hn::BitCast(BitsTag(), number), hn::BitCast(BitsTag(), hn::Set(d, 0xffffu)));
    return hn::BitCast(WordTag(), hn::Or(low, hn::BitCast(BitsTag(), hn::ShiftLeft<16>(number))));
  };
  for (int64_t part = 0; part < 2; ++part) {  // of 128 numbers
    for (int64_t half = 0; half < 2; ++half) {
      BitsVec a[4], b[4], high[4];
      rows.Dwords(64 * part + 16 * half, a);
      rows.Dwords(64 * part + 16 * half + 32, b);
      rows.Dwords(128 + 32 * part + 16 * half, high);
      const auto put = [&](int64_t i, const auto& bytes) HWY_ATTR {
        const auto to = place(4 * part + i);
        const WordVec by = scale(4 * part + i, half);
        CARREL_UNROLL
        for (int64_t k = 0; k < 4; ++k) PutFolded(to, half, k, bytes(k), by);
      };
      put(0, [&](int64_t k) HWY_ATTR {
        return hn::Or(LowNibbles(a[k]), hn::And(hn::ShiftLeft<4>(high[k]), two));
      });
      put(1, [&](int64_t k) HWY_ATTR {
        return hn::Or(LowNibbles(b[k]), hn::And(hn::ShiftLeft<2>(high[k]), two));
      });
      put(2, [&](int64_t k) HWY_ATTR { return hn::Or(HighNibbles(a[k]), hn::And(high[k], two)); });
      put(3, [&](int64_t k) HWY_ATTR {
        return hn::Or(HighNibbles(b[k]), hn::And(hn::ShiftRight<2>(high[k]), two));
      });
    }
  }
  const FloatVec d = LowHalves(hn::BitCast(BitsTag(), hn::Load(DwordTag(), steps)));
  for (int64_t g = 0; g < kChunkGroups; ++g) place(g).Scale(d);
}

template <class Place>
HWY_INLINE void FillChunk(Iq4XsProduct, const LaneRows& rows, int64_t /*groups*/,
                          const Place& place) {
  const DwordTag du;
  BitsVec head[4];
  rows.Dwords(0, head);
  const FloatVec d = LowHalves(head[0]);
  const DwordVec high = hn::ShiftRight<16>(hn::BitCast(du, head[0]));
  const DwordVec low = hn::BitCast(du, head[1]);
  for (int64_t g = 0; g < kChunkGroups; ++g) {
    const auto to = place(g);
    const DwordVec four =
        hn::And(hn::ShiftRightSame(low, static_cast<int>(4 * g)), hn::Set(du, 15u));
    const DwordVec two =
        hn::And(hn::ShiftRightSame(high, static_cast<int>(2 * g)), hn::Set(du, 3u));
    const FloatVec scale = Numbers(hn::Or(four, hn::ShiftLeft<4>(two)));
    to.Scale(hn::Mul(d, hn::Sub(scale, hn::Set(FloatTag(), 32.0f))));
    PutSteps(rows, 8 + 16 * g, kNormalSteps, to);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
