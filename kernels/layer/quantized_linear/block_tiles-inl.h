// What:   what products with rows of blocks have in common: pairs of words added up, tiles of small
//         numbers, bits of blocks brought to where they are needed.
// Shapes: WordOrder (packed_input-inl.h) says what a tile is.
#if defined(CARREL_KERNELS_BLOCK_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_BLOCK_TILES_INL_H_
#undef CARREL_KERNELS_BLOCK_TILES_INL_H_
#else
#define CARREL_KERNELS_BLOCK_TILES_INL_H_
#endif

#include <algorithm>
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

// A type of small_blocks-inl.h or large_blocks-inl.h: kBytes of a block of kValues. kMinimum: groups have
// one; kFolded: scales are of 16 numbers each, and a panel's words come multiplied by them.
template <int64_t values, int64_t bytes, WordOrder order, bool minimum, bool folded = false>
struct BlockProduct {
  static constexpr int64_t kValues = values, kBytes = bytes;
  static constexpr WordOrder kOrder = order;
  static constexpr bool kMinimum = minimum, kFolded = folded;
};

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

HWY_INLINE uint64_t Load16(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return bits;
}

// 2^(e - 128), e from 0 to 255.
template <class D, class V>
HWY_INLINE hn::Vec<D> PowerOfTwo(D d, V e) {
  const hn::RebindToSigned<D> d32;
  // Below 2^-126 a float is denormal.
  const auto small =
      hn::IfThenElse(hn::Eq(e, hn::Zero(d32)), hn::Set(d32, 0x00200000), hn::Set(d32, 0x00400000));
  const auto usual = hn::ShiftLeft<23>(hn::Sub(e, hn::Set(d32, 1)));
  return hn::BitCast(d, hn::IfThenElse(hn::Gt(e, hn::Set(d32, 1)), usual, small));
}

#if HWY_TARGET <= HWY_AVX3
// Which words of two vectors a vector takes.
struct alignas(64) WordPicks {
  uint16_t at[32] = {};
};

HWY_INLINE __m512i PickWords(ByteVec a, ByteVec b, const WordPicks& picks) {
  return _mm512_permutex2var_epi16(a.raw, _mm512_load_si512(picks.at), b.raw);
}

// Of blocks of `bytes` bytes, four in each vector, the words at byte `at`; then those after them.
constexpr WordPicks FourToAVector(int64_t at, int64_t bytes) {
  WordPicks picks;
  for (int64_t i = 0; i < 16; ++i) {
    picks.at[i] = static_cast<uint16_t>(i % 8 / 4 * 32 + (i % 4 * bytes + at) / 2 + i / 8);
  }
  return picks;
}

// The same of two blocks in each vector, at byte `a` of the first and `b` of the next.
constexpr WordPicks TwoToAVector(int64_t a, int64_t b, int64_t bytes) {
  WordPicks picks;
  for (int64_t i = 0; i < 8; ++i) {
    const int64_t byte = i % 2 * bytes + (i % 4 < 2 ? a : 64 + b);
    picks.at[i] = static_cast<uint16_t>(byte / 2 + i / 4);
  }
  return picks;
}
#endif

// Blocks of 32 numbers of a chunk: 8, or fewer at a row's end; beyond them all is zero. Of how many
// they are the compiler knows, or else `count` says.
inline constexpr int64_t kSomeBlocks = 0;
template <int64_t kBytes, int64_t kBlocks>
struct BlocksOf {
  const uint8_t* first;
  int64_t count;

  HWY_INLINE bool Has(int64_t i) const { return i < (kBlocks == kSomeBlocks ? count : kBlocks); }
  // Whether no block of the tile is there; a taker has tiles in twos.
  template <class Taker>
  HWY_INLINE bool EndBefore(int64_t tile, Taker& taker) const {
    if (Has(tile * kTileGroups)) return false;
    if (tile % 2 == 1) taker.NoTile(tile);
    return true;
  }
  HWY_INLINE int HalfBits(int64_t i, int64_t at) const {
    return Has(i) ? static_cast<int>(Load16(first + i * kBytes + at)) : 0;
  }
  static HWY_INLINE GroupVec WidenHalves(__m128i bits) {
    return hn::PromoteTo(GroupTag(), hn::Vec<hn::FixedTag<hwy::float16_t, 8>>{bits});
  }
  // The fp16 numbers at byte kAt of every block.
  template <int64_t kAt>
  HWY_INLINE GroupVec Halves() const {
#if HWY_TARGET <= HWY_AVX3
    if constexpr (kBlocks == kChunkGroups) return HalvesOf8<kAt>(nullptr);
#endif
    __m128i bits = _mm_setzero_si128();
    bits = _mm_insert_epi16(bits, HalfBits(0, kAt), 0);
    bits = _mm_insert_epi16(bits, HalfBits(1, kAt), 1);
    bits = _mm_insert_epi16(bits, HalfBits(2, kAt), 2);
    bits = _mm_insert_epi16(bits, HalfBits(3, kAt), 3);
    bits = _mm_insert_epi16(bits, HalfBits(4, kAt), 4);
    bits = _mm_insert_epi16(bits, HalfBits(5, kAt), 5);
    bits = _mm_insert_epi16(bits, HalfBits(6, kAt), 6);
    bits = _mm_insert_epi16(bits, HalfBits(7, kAt), 7);
    return WidenHalves(bits);
  }
  // The same, and those that follow them.
  template <int64_t kAt>
  HWY_INLINE void HalfPairs(GroupVec& a, GroupVec& b) const {
#if HWY_TARGET <= HWY_AVX3
    if constexpr (kBlocks == kChunkGroups) {
      a = HalvesOf8<kAt>(&b);
      return;
    }
#endif
    const auto four = [&](int64_t i) HWY_ATTR {
      const auto pair = [&](int64_t k) HWY_ATTR {
        int32_t bits = 0;
        if (Has(i + k)) std::memcpy(&bits, first + (i + k) * kBytes + kAt, sizeof(bits));
        return bits;
      };
      __m128i bits = _mm_cvtsi32_si128(pair(0));
      bits = _mm_insert_epi32(bits, pair(1), 1);
      bits = _mm_insert_epi32(bits, pair(2), 2);
      bits = _mm_insert_epi32(bits, pair(3), 3);
      // The first of each, then the others.
      return _mm_shuffle_epi8(bits,
                              _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    };
    const __m128i low = four(0), high = four(4);
    a = WidenHalves(_mm_unpacklo_epi64(low, high));
    b = WidenHalves(_mm_unpackhi_epi64(low, high));
  }
#if HWY_TARGET <= HWY_AVX3
  // Of 8 blocks, by permutations of what lies around: some 24 scalar instructions less.
  template <int64_t kAt>
  HWY_INLINE GroupVec HalvesOf8(GroupVec* next) const {
    const auto words = [&](int64_t from) HWY_ATTR { return hn::LoadU(ByteTag(), first + from); };
    __m128i low, high;
    if constexpr (3 * kBytes + 4 <= 64) {
      // Four blocks to a vector.
      static constexpr WordPicks kPicks = FourToAVector(kAt, kBytes);
      const __m512i all = PickWords(words(0), words(4 * kBytes), kPicks);
      low = _mm512_castsi512_si128(all);
      high = _mm512_extracti32x4_epi32(all, 1);
    } else {
      // Two to a vector; the last vector begins earlier, to end where the blocks do.
      constexpr int64_t kBack = std::max<int64_t>(0, 64 - 2 * kBytes);
      static constexpr WordPicks kPicks = TwoToAVector(kAt, kAt, kBytes);
      static constexpr WordPicks kLast = TwoToAVector(kAt, kAt + kBack, kBytes);
      const __m512i a = PickWords(words(0), words(2 * kBytes), kPicks);
      const __m512i b = PickWords(words(4 * kBytes), words(6 * kBytes - kBack), kLast);
      low = _mm_unpacklo_epi64(_mm512_castsi512_si128(a), _mm512_castsi512_si128(b));
      high = _mm_unpackhi_epi64(_mm512_castsi512_si128(a), _mm512_castsi512_si128(b));
    }
    if (next != nullptr) *next = WidenHalves(high);
    return WidenHalves(low);
  }
#endif
  // 2^(e - 128) of the bytes at `at` of every block (MXFP4); 1 beyond them.
  HWY_INLINE GroupVec Powers(int64_t at) const {
    const hn::RebindToSigned<GroupTag> d32;
    uint64_t exponents = 0;
    CARREL_UNROLL
    for (int64_t i = 0; i < kChunkGroups; ++i) {
      exponents |= uint64_t{Has(i) ? first[i * kBytes + at] : uint8_t{128}} << (8 * i);
    }
    const hn::FixedTag<uint64_t, 1> d64;
    return PowerOfTwo(GroupTag(), hn::PromoteTo(d32, hn::BitCast(hn::FixedTag<uint8_t, 8>(),
                                                                 hn::Set(d64, exponents))));
  }
  HWY_INLINE auto Piece16(int64_t i, int64_t at) const {
    const hn::FixedTag<uint8_t, 16> d;
    return Has(i) ? hn::LoadU(d, first + i * kBytes + at) : hn::Zero(d);
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
  // 32 bytes of each block of a tile: the first 16 of all, and the last.
  HWY_INLINE void Pieces32(int64_t tile, int64_t at, ByteVec& low, ByteVec& high) const {
#if HWY_TARGET <= HWY_AVX3
    const hn::FixedTag<uint8_t, 32> d2;
    const auto two = [&](int64_t i) HWY_ATTR {
      const auto piece = [&](int64_t k) HWY_ATTR {
        return Has(k) ? hn::LoadU(d2, first + k * kBytes + at) : hn::Zero(d2);
      };
      return hn::Combine(ByteTag(), piece(i + 1), piece(i)).raw;
    };
    const __m512i a = two(tile * kTileGroups), b = two(tile * kTileGroups + 2);
    low = ByteVec{_mm512_shuffle_i32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0))};
    high = ByteVec{_mm512_shuffle_i32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1))};
#else
    low = Pieces16(tile, at);
    high = Pieces16(tile, at + 16);
#endif
  }
  // 4 bytes of each block of a tile, repeated over the 16 bytes of the block.
  HWY_INLINE ByteVec Words32(int64_t tile, int64_t at) const {
    const hn::FixedTag<uint32_t, 4> d;
    const hn::FixedTag<uint32_t, 8> d2;
    const auto word = [&](int64_t i) HWY_ATTR {
      uint32_t bits = 0;
      if (Has(i)) std::memcpy(&bits, first + i * kBytes + at, sizeof(bits));
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
