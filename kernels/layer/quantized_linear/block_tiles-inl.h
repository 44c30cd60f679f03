// What:   what products with rows of blocks have in common: pairs of words added up, tiles of small
//         numbers, bits of blocks brought to where they are needed.
// Shapes: WordOrder (packed_input-inl.h) says what a tile is.
#if defined(CARREL_KERNELS_BLOCK_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_BLOCK_TILES_INL_H_
#undef CARREL_KERNELS_BLOCK_TILES_INL_H_
#else
#define CARREL_KERNELS_BLOCK_TILES_INL_H_
#endif

#include <cstring>

#include "kernels/layer/quantized_linear/packed_input-inl.h"

// Loops over what lives in registers.
#undef CARREL_UNROLL
#define CARREL_UNROLL _Pragma("GCC unroll 8")

// Highway's AVX3_DL is chosen where there is VNNI, but does not tell the compiler.
#undef CARREL_VNNI
#undef CARREL_VNNI_ATTR
#if HWY_TARGET <= HWY_AVX3_DL && HWY_COMPILER_GCC_ACTUAL
#define CARREL_VNNI 1
#define CARREL_VNNI_ATTR __attribute__((target("avx512vnni")))
#else
#define CARREL_VNNI 0
#define CARREL_VNNI_ATTR
#endif

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

using SumTag = hn::ScalableTag<int32_t>;
using SumVec = hn::Vec<SumTag>;
using WordTag = hn::Repartition<int16_t, SumTag>;
using WordVec = hn::Vec<WordTag>;
using BitsTag = hn::RebindToUnsigned<WordTag>;
using BitsVec = hn::Vec<BitsTag>;
using ByteTag = hn::Repartition<uint8_t, SumTag>;
using ByteVec = hn::Vec<ByteTag>;
// One number per group of a chunk.
using GroupTag = hn::CappedTag<float, kChunkGroups>;
using GroupVec = hn::Vec<GroupTag>;

inline constexpr int64_t kLanes = HWY_LANES(float);  // 8 or 16

// sum + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]
CARREL_VNNI_ATTR HWY_INLINE SumVec AddPairs(SumVec sum, WordVec a, WordVec b) {
#if CARREL_VNNI
  return SumVec{_mm512_dpwssd_epi32(sum.raw, a.raw, b.raw)};
#else
  return hn::ReorderWidenMulAccumulate(SumTag(), a, b, sum, sum);
#endif
}

HWY_INLINE WordVec LoadWords(const int16_t* words) { return hn::LoadU(WordTag(), words); }

// Lane i takes the number of group kTable[i / 4] or kTable[i / 8].
template <class D>
HWY_INLINE FloatVec SpreadGroups(D d, GroupVec groups, const int32_t* table) {
  const auto indices = hn::SetTableIndices(d, table);
#if HWY_TARGET <= HWY_AVX3
  return hn::TableLookupLanes(hn::ZeroExtendVector(d, groups), indices);
#else
  return hn::TableLookupLanes(groups, indices);
#endif
}

// The group that each lane of the tiles of a chunk belongs to (WordOrder).
#define CARREL_FOUR(g) g, g, g, g
#define CARREL_EIGHT(g) g, g, g, g, g, g, g, g
alignas(64) inline constexpr int32_t kQuarterLanes[32] = {
    CARREL_FOUR(0), CARREL_FOUR(1), CARREL_FOUR(2), CARREL_FOUR(3),
    CARREL_FOUR(4), CARREL_FOUR(5), CARREL_FOUR(6), CARREL_FOUR(7)};
// Of 16 scales, each for half a group: those that lanes take from a vector of 8 or 16.
alignas(64) inline constexpr int32_t kFourLanes[64] = {
    CARREL_FOUR(0),  CARREL_FOUR(1),  CARREL_FOUR(2),  CARREL_FOUR(3),
    CARREL_FOUR(4),  CARREL_FOUR(5),  CARREL_FOUR(6),  CARREL_FOUR(7),
    CARREL_FOUR(8),  CARREL_FOUR(9),  CARREL_FOUR(10), CARREL_FOUR(11),
    CARREL_FOUR(12), CARREL_FOUR(13), CARREL_FOUR(14), CARREL_FOUR(15)};
alignas(64) inline constexpr int32_t kPairLanes[16] = {0, 0, 1, 1, 2, 2, 3, 3,
                                                       4, 4, 5, 5, 6, 6, 7, 7};
alignas(64) inline constexpr int32_t kHalfLanes[64] = {
    CARREL_EIGHT(0), CARREL_EIGHT(1), CARREL_EIGHT(2), CARREL_EIGHT(3),
    CARREL_EIGHT(4), CARREL_EIGHT(5), CARREL_EIGHT(6), CARREL_EIGHT(7)};
#if HWY_TARGET <= HWY_AVX3
alignas(64) inline constexpr int32_t kHalfLanesApart[64] = {
    CARREL_EIGHT(0), CARREL_EIGHT(2), CARREL_EIGHT(1), CARREL_EIGHT(3),
    CARREL_EIGHT(4), CARREL_EIGHT(6), CARREL_EIGHT(5), CARREL_EIGHT(7)};
#else
inline constexpr const int32_t (&kHalfLanesApart)[64] = kHalfLanes;
#endif
#undef CARREL_FOUR
#undef CARREL_EIGHT

// The group of each lane of a type's tiles.
template <WordOrder kOrder>
HWY_INLINE const int32_t* LanesOf(int64_t tile) {
  if constexpr (kOrder == WordOrder::kQuarters) return kQuarterLanes + tile * kLanes;
  if constexpr (kOrder == WordOrder::kHalvesApart) return kHalfLanesApart + tile * kLanes;
  return kHalfLanes + tile * kLanes;
}

// Who takes a row's chunks, as the types read them (small_blocks-inl.h): first scales and minima of
// its groups, then its tiles. Here: their products with N inputs.
template <int N>
struct RowSums {
  const PackedChunk* x[N];
  FloatVec products[N];
  GroupVec minima[N];
  GroupVec scales[N];                    // of this chunk
  FloatVec half_scales[N][16 / kLanes];  // where half a group has its own

  HWY_INLINE void Scale(GroupVec d) {
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) scales[h] = hn::Mul(d, hn::LoadU(GroupTag(), x[h]->scales));
  }

  HWY_INLINE void Minimum(GroupVec m) {
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      minima[h] = hn::MulAdd(m, hn::LoadU(GroupTag(), x[h]->sums), minima[h]);
    }
  }

  // Values count from -offset; a scale for each 16 of them is `step` times one of the bytes.
  HWY_INLINE void ScaleHalves(GroupVec step, const int8_t* bytes, int offset) {
    const GroupTag d;
    const GroupVec first = hn::Mul(step, Widen8(bytes)), last = hn::Mul(step, Widen8(bytes + 8));
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      const GroupVec from = hn::Set(d, static_cast<float>(-offset));
      const auto sum = [&](GroupVec scale, int64_t at) HWY_ATTR {
        minima[h] = hn::MulAdd(hn::Mul(scale, from), hn::LoadU(d, x[h]->half_sums + at), minima[h]);
      };
      sum(first, 0);
      sum(last, 8);
      const GroupVec by_group = hn::LoadU(d, x[h]->scales);
#if HWY_TARGET <= HWY_AVX3
      half_scales[h][0] = hn::Mul(hn::Combine(FloatTag(), last, first),
                                  SpreadGroups(FloatTag(), by_group, kPairLanes));
#else
      half_scales[h][0] = hn::Mul(first, SpreadGroups(FloatTag(), by_group, kPairLanes));
      half_scales[h][1] = hn::Mul(last, SpreadGroups(FloatTag(), by_group, kPairLanes + 8));
#endif
    }
  }

  template <WordOrder kOrder, int kVectors>
  CARREL_VNNI_ATTR HWY_INLINE void Tile(const WordVec (&q)[kVectors], int64_t tile) {
    FloatVec factors[N];
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      factors[h] = SpreadGroups(FloatTag(), scales[h], LanesOf<kOrder>(tile));
    }
    AddProducts(q, tile, factors);
  }

  // After ScaleHalves; four lanes to a scale.
  CARREL_VNNI_ATTR HWY_INLINE void TileOfHalves(const WordVec (&q)[2], int64_t tile) {
    FloatVec factors[N];
    const int64_t in_vector = 64 / (16 / kLanes) / kLanes;
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      factors[h] = hn::TableLookupLanes(
          half_scales[h][tile / in_vector],
          hn::SetTableIndices(FloatTag(), kFourLanes + tile % in_vector * kLanes));
    }
    AddProducts(q, tile, factors);
  }

 private:
  static HWY_INLINE GroupVec Widen8(const int8_t* at) {
    const hn::FixedTag<int8_t, 8> d;
    const hn::RebindToSigned<GroupTag> d32;
    return hn::ConvertTo(GroupTag(), hn::PromoteTo(d32, hn::LoadU(d, at)));
  }

  // Small numbers of a tile, one vector per quarter or half; factors[h] scales their products.
  template <int kVectors>
  CARREL_VNNI_ATTR HWY_INLINE void AddProducts(const WordVec (&q)[kVectors], int64_t tile,
                                               const FloatVec (&factors)[N]) {
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      const int16_t* words = x[h]->words + tile * kVectors * kVectorWords;
      SumVec sum = hn::Zero(SumTag());
      CARREL_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        sum = AddPairs(sum, q[i], LoadWords(words + i * kVectorWords));
      }
      products[h] = hn::MulAdd(hn::ConvertTo(FloatTag(), sum), factors[h], products[h]);
    }
  }
};

HWY_INLINE uint64_t Load16(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return bits;
}

// Blocks of 32 numbers of a chunk: 8, or fewer at a row's end; beyond them all is zero. Of how many
// they are the compiler knows, or else `count` says.
inline constexpr int64_t kSomeBlocks = 0;
template <int64_t kBlocks>
struct Blocks {
  const uint8_t* first;
  int64_t bytes;
  int64_t count;

  HWY_INLINE bool Has(int64_t i) const { return i < (kBlocks == kSomeBlocks ? count : kBlocks); }
  HWY_INLINE uint64_t HalfBits(int64_t i, int64_t at) const {
    return Has(i) ? Load16(first + i * bytes + at) : 0;
  }
  // The fp16 numbers at byte `at` of every block.
  HWY_INLINE GroupVec Halves(int64_t at) const {
    const uint64_t low =
        HalfBits(0, at) | HalfBits(1, at) << 16 | HalfBits(2, at) << 32 | HalfBits(3, at) << 48;
    const uint64_t high =
        HalfBits(4, at) | HalfBits(5, at) << 16 | HalfBits(6, at) << 32 | HalfBits(7, at) << 48;
    const hn::FixedTag<uint64_t, 2> d64;
    const hn::FixedTag<hwy::float16_t, 8> d16;
    const auto bits = hn::InterleaveLower(d64, hn::Set(d64, low), hn::Set(d64, high));
    return hn::PromoteTo(GroupTag(), hn::BitCast(d16, bits));
  }
  // The same of byte `at`, and of what follows it.
  HWY_INLINE void HalfPairs(int64_t at, GroupVec& a, GroupVec& b) const {
    const auto pair = [&](int64_t i) HWY_ATTR {
      uint32_t bits = 0;
      if (Has(i)) std::memcpy(&bits, first + i * bytes + at, sizeof(bits));
      return uint64_t{bits};
    };
    const hn::FixedTag<uint64_t, 2> d64;
    const hn::FixedTag<uint16_t, 8> d16;
    const hn::FixedTag<hwy::float16_t, 8> df16;
    const auto four = [&](int64_t i) HWY_ATTR {
      return hn::BitCast(d16, hn::InterleaveLower(d64, hn::Set(d64, pair(i) | pair(i + 1) << 32),
                                                  hn::Set(d64, pair(i + 2) | pair(i + 3) << 32)));
    };
    const auto low = four(0), high = four(4);
    a = hn::PromoteTo(GroupTag(), hn::BitCast(df16, hn::ConcatEven(d16, high, low)));
    b = hn::PromoteTo(GroupTag(), hn::BitCast(df16, hn::ConcatOdd(d16, high, low)));
  }
  // 2^(e - 128) of the bytes at `at` of every block (MXFP4); 1 beyond them.
  HWY_INLINE GroupVec Powers(int64_t at) const {
    const hn::RebindToSigned<GroupTag> d32;
    uint64_t exponents = 0;
    CARREL_UNROLL
    for (int64_t i = 0; i < kChunkGroups; ++i) {
      exponents |= uint64_t{Has(i) ? first[i * bytes + at] : uint8_t{128}} << (8 * i);
    }
    const hn::FixedTag<uint64_t, 1> d64;
    const auto e =
        hn::PromoteTo(d32, hn::BitCast(hn::FixedTag<uint8_t, 8>(), hn::Set(d64, exponents)));
    // Below 2^-126 a float is denormal.
    const auto small = hn::IfThenElse(hn::Eq(e, hn::Zero(d32)), hn::Set(d32, 0x00200000),
                                      hn::Set(d32, 0x00400000));
    const auto usual = hn::ShiftLeft<23>(hn::Sub(e, hn::Set(d32, 1)));
    return hn::BitCast(GroupTag(), hn::IfThenElse(hn::Gt(e, hn::Set(d32, 1)), usual, small));
  }
  HWY_INLINE auto Piece16(int64_t i, int64_t at) const {
    const hn::FixedTag<uint8_t, 16> d;
    return Has(i) ? hn::LoadU(d, first + i * bytes + at) : hn::Zero(d);
  }
  HWY_INLINE auto Piece32(int64_t i, int64_t at) const {
    const hn::FixedTag<uint8_t, 32> d;
    return Has(i) ? hn::LoadU(d, first + i * bytes + at) : hn::Zero(d);
  }
  // 16 bytes of each block of a tile.
  HWY_INLINE ByteVec Pieces16(int64_t tile, int64_t at) const {
    const hn::FixedTag<uint8_t, 32> d2;
    const int64_t i = tile * kLanes / 4;
    const auto low = hn::Combine(d2, Piece16(i + 1, at), Piece16(i, at));
#if HWY_TARGET <= HWY_AVX3
    const auto high = hn::Combine(d2, Piece16(i + 3, at), Piece16(i + 2, at));
    return hn::Combine(ByteTag(), high, low);
#else
    return low;
#endif
  }
  // 4 bytes of each block of a tile, repeated over the 16 bytes of the block.
  HWY_INLINE ByteVec Words32(int64_t tile, int64_t at) const {
    const hn::FixedTag<uint32_t, 4> d;
    const hn::FixedTag<uint32_t, 8> d2;
    const auto word = [&](int64_t i) HWY_ATTR {
      uint32_t bits = 0;
      if (Has(i)) std::memcpy(&bits, first + i * bytes + at, sizeof(bits));
      return hn::Set(d, bits);
    };
    const int64_t i = tile * kLanes / 4;
    const auto low = hn::Combine(d2, word(i + 1), word(i));
#if HWY_TARGET <= HWY_AVX3
    const auto high = hn::Combine(d2, word(i + 3), word(i + 2));
    return hn::BitCast(ByteTag(), hn::Combine(hn::RebindToUnsigned<SumTag>(), high, low));
#else
    return hn::BitCast(ByteTag(), low);
#endif
  }
  // 32 bytes of each block of a tile.
  HWY_INLINE ByteVec Pieces32(int64_t tile, int64_t at) const {
#if HWY_TARGET <= HWY_AVX3
    return hn::Combine(ByteTag(), Piece32(2 * tile + 1, at), Piece32(2 * tile, at));
#else
    return Piece32(tile, at);
#endif
  }
};

// The four quarters of a tile of nibbles.
HWY_INLINE void Quarters(ByteVec bytes, WordVec (&q)[4]) {
  const BitsTag d;
  const WordTag dw;
  const BitsVec mask = hn::Set(d, uint16_t{15}), bits = hn::BitCast(d, bytes);
  q[0] = hn::BitCast(dw, hn::And(bits, mask));
  q[1] = hn::BitCast(dw, hn::And(hn::ShiftRight<8>(bits), mask));
  q[2] = hn::BitCast(dw, hn::And(hn::ShiftRight<4>(bits), mask));
  q[3] = hn::BitCast(dw, hn::ShiftRight<12>(bits));
}

// Even and odd bytes.
HWY_INLINE void Halves(BitsVec bytes, WordVec* q) {
  const BitsTag d;
  const WordTag dw;
  q[0] = hn::BitCast(dw, hn::And(bytes, hn::Set(d, uint16_t{255})));
  q[1] = hn::BitCast(dw, hn::ShiftRight<8>(bytes));
}

// Even and odd bytes, signed.
HWY_INLINE void SignedHalves(ByteVec bytes, WordVec* q) {
  const WordVec words = hn::BitCast(WordTag(), bytes);
  q[0] = hn::ShiftRight<8>(hn::ShiftLeft<8>(words));
  q[1] = hn::ShiftRight<8>(words);
}

HWY_INLINE BitsVec LowNibbles(BitsVec bytes) {
  return hn::And(bytes, hn::Set(BitsTag(), uint16_t{0x0f0f}));
}

HWY_INLINE BitsVec HighNibbles(BitsVec bytes) { return LowNibbles(hn::ShiftRight<4>(bytes)); }

// The four quarters of a tile of nibbles that stand for the values of a table.
HWY_INLINE void QuartersOfSteps(ByteVec bytes, const int8_t* steps, WordVec (&q)[4]) {
  const ByteTag d;
  const ByteVec table = hn::LoadDup128(d, reinterpret_cast<const uint8_t*>(steps));
  const BitsVec bits = hn::BitCast(BitsTag(), bytes);
  SignedHalves(hn::TableLookupBytes(table, hn::BitCast(d, LowNibbles(bits))), q);
  SignedHalves(hn::TableLookupBytes(table, hn::BitCast(d, HighNibbles(bits))), q + 2);
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
