// What:   inner products of quantised rows, as they lie, with packed inputs: one struct per type.
// Math:   of a chunk of 256 numbers: sum_g d_g scale_g sum_c q[c] word[c] + m_g sums_g, where a type
//         that counts from -8, -16 or -32 has this times d as its m. Sums of q * word are exact.
// Cost:   AVX-512 with VNNI: some 20 instructions per 128 weights of 4 bits.
#if defined(CARREL_KERNELS_BLOCK_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_BLOCK_PRODUCTS_INL_H_
#undef CARREL_KERNELS_BLOCK_PRODUCTS_INL_H_
#else
#define CARREL_KERNELS_BLOCK_PRODUCTS_INL_H_
#endif

#include <cstring>

#include "kernels/quantized_linear/packed_input-inl.h"

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

// What a row has summed up for each of N inputs.
template <int N>
struct RowSums {
  FloatVec products[N];
  GroupVec minima[N];
};

// Small numbers of a tile, one vector per quarter or half; factors[h] scales their products.
template <int kVectors, int N>
CARREL_VNNI_ATTR HWY_INLINE void AddTile(const WordVec (&q)[kVectors], int64_t tile,
                                         const PackedChunk* const (&x)[N],
                                         const FloatVec (&factors)[N], RowSums<N>& sums) {
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) {
    const int16_t* words = x[h]->words + tile * kVectors * kVectorWords;
    SumVec sum = hn::Zero(SumTag());
    CARREL_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      sum = AddPairs(sum, q[i], LoadWords(words + i * kVectorWords));
    }
    sums.products[h] = hn::MulAdd(hn::ConvertTo(FloatTag(), sum), factors[h], sums.products[h]);
  }
}

// The same with a scale per group; lanes: the group of each lane of a chunk.
template <int kVectors, int N>
CARREL_VNNI_ATTR HWY_INLINE void AddTile(const WordVec (&q)[kVectors], int64_t tile,
                                         const int32_t* lanes, const PackedChunk* const (&x)[N],
                                         const GroupVec (&scales)[N], RowSums<N>& sums) {
  FloatVec factors[N];
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) {
    factors[h] = SpreadGroups(FloatTag(), scales[h], lanes + tile * kLanes);
  }
  AddTile(q, tile, x, factors, sums);
}

HWY_INLINE uint64_t Load16(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  return bits;
}

// Blocks of 32 numbers of a chunk: 8, or `count` at a row's end; beyond them all is zero.
template <bool kAll>
struct Blocks {
  const uint8_t* first;
  int64_t bytes;
  int64_t count;

  HWY_INLINE bool Has(int64_t i) const { return kAll || i < count; }
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

template <int N>
HWY_INLINE void ScaleGroups(GroupVec d, const PackedChunk* const (&x)[N], GroupVec (&scales)[N]) {
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) scales[h] = hn::Mul(d, hn::LoadU(GroupTag(), x[h]->scales));
}

template <int N>
HWY_INLINE void AddMinima(GroupVec m, const PackedChunk* const (&x)[N], RowSums<N>& sums) {
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) {
    sums.minima[h] = hn::MulAdd(m, hn::LoadU(GroupTag(), x[h]->sums), sums.minima[h]);
  }
}

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

// Each type: kBytes of a block of kValues; AddChunk adds 256 numbers to the sums.
struct Q4_0Product {
  static constexpr int64_t kValues = 32, kBytes = 18;
  static constexpr WordOrder kOrder = WordOrder::kQuarters;
  template <bool kAll, int N>
  static CARREL_VNNI_ATTR HWY_INLINE void AddChunk(const Blocks<kAll>& blocks,
                                                   const PackedChunk* const (&x)[N],
                                                   RowSums<N>& sums) {
    const GroupVec d = blocks.Halves(0);
    GroupVec scales[N];
    ScaleGroups(d, x, scales);
    AddMinima(hn::Mul(d, hn::Set(GroupTag(), -8.0f)), x, sums);
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; ++tile) {
      if (!blocks.Has(tile * kLanes / 4)) break;
      WordVec q[4];
      Quarters(blocks.Pieces16(tile, 2), q);
      AddTile(q, tile, kQuarterLanes, x, scales, sums);
    }
  }
};

struct Q4_1Product {
  static constexpr int64_t kValues = 32, kBytes = 20;
  static constexpr WordOrder kOrder = WordOrder::kQuarters;
  template <bool kAll, int N>
  static CARREL_VNNI_ATTR HWY_INLINE void AddChunk(const Blocks<kAll>& blocks,
                                                   const PackedChunk* const (&x)[N],
                                                   RowSums<N>& sums) {
    GroupVec scales[N];
    ScaleGroups(blocks.Halves(0), x, scales);
    AddMinima(blocks.Halves(2), x, sums);
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 32 / kLanes; ++tile) {
      if (!blocks.Has(tile * kLanes / 4)) break;
      WordVec q[4];
      Quarters(blocks.Pieces16(tile, 4), q);
      AddTile(q, tile, kQuarterLanes, x, scales, sums);
    }
  }
};

// Q5_0 and Q5_1: 32 bits at byte kHigh are the fifth bits of a block's values, 16 bytes of nibbles
// follow.
template <int64_t kHigh, bool kAll, int N>
CARREL_VNNI_ATTR HWY_INLINE void AddFiveBits(const Blocks<kAll>& blocks,
                                             const PackedChunk* const (&x)[N],
                                             const GroupVec (&scales)[N], RowSums<N>& sums) {
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
    if (!blocks.Has(tile * kLanes / 4)) break;
    const ByteVec bits = blocks.Words32(tile, kHigh);
    const BitsVec nibbles = hn::BitCast(BitsTag(), blocks.Pieces16(tile, kHigh + 4));
    WordVec q[4];
    Halves(hn::Or(LowNibbles(nibbles), fifth(bits, low)), q);
    Halves(hn::Or(HighNibbles(nibbles), fifth(bits, high)), q + 2);
    AddTile(q, tile, kQuarterLanes, x, scales, sums);
  }
}

struct Q5_0Product {
  static constexpr int64_t kValues = 32, kBytes = 22;
  static constexpr WordOrder kOrder = WordOrder::kQuarters;
  template <bool kAll, int N>
  static CARREL_VNNI_ATTR HWY_INLINE void AddChunk(const Blocks<kAll>& blocks,
                                                   const PackedChunk* const (&x)[N],
                                                   RowSums<N>& sums) {
    const GroupVec d = blocks.Halves(0);
    GroupVec scales[N];
    ScaleGroups(d, x, scales);
    AddMinima(hn::Mul(d, hn::Set(GroupTag(), -16.0f)), x, sums);
    AddFiveBits<2>(blocks, x, scales, sums);
  }
};

struct Q5_1Product {
  static constexpr int64_t kValues = 32, kBytes = 24;
  static constexpr WordOrder kOrder = WordOrder::kQuarters;
  template <bool kAll, int N>
  static CARREL_VNNI_ATTR HWY_INLINE void AddChunk(const Blocks<kAll>& blocks,
                                                   const PackedChunk* const (&x)[N],
                                                   RowSums<N>& sums) {
    GroupVec scales[N];
    ScaleGroups(blocks.Halves(0), x, scales);
    AddMinima(blocks.Halves(2), x, sums);
    AddFiveBits<4>(blocks, x, scales, sums);
  }
};

struct Q8_0Product {
  static constexpr int64_t kValues = 32, kBytes = 34;
  static constexpr WordOrder kOrder = WordOrder::kHalves;
  template <bool kAll, int N>
  static CARREL_VNNI_ATTR HWY_INLINE void AddChunk(const Blocks<kAll>& blocks,
                                                   const PackedChunk* const (&x)[N],
                                                   RowSums<N>& sums) {
    GroupVec scales[N];
    ScaleGroups(blocks.Halves(0), x, scales);
    CARREL_UNROLL
    for (int64_t tile = 0; tile < 64 / kLanes; ++tile) {
      if (!blocks.Has(tile * kLanes / 8)) break;
      WordVec q[2];
      SignedHalves(blocks.Pieces32(tile, 2), q);
      AddTile(q, tile, kHalfLanes, x, scales, sums);
    }
  }
};

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
  template <bool kAll, int N>
  static CARREL_VNNI_ATTR HWY_INLINE void AddChunk(const Blocks<kAll>& blocks,
                                                   const PackedChunk* const (&x)[N],
                                                   RowSums<N>& sums) {
    const uint8_t* block = blocks.first;
    const SixBitScales six(block + 4);
    GroupVec scales[N];
    ScaleGroups(hn::Mul(SetHalf(block, 1), six.scales), x, scales);
    AddMinima(hn::Mul(SetHalf(block + 2, -1), six.minima), x, sums);
    CARREL_UNROLL
    for (int64_t at = 0; at < 128 / (4 * kLanes); ++at) {
      WordVec q[4];
      Quarters(hn::LoadU(ByteTag(), block + 16 + at * 4 * kLanes), q);
      const WordVec low[2] = {q[0], q[1]}, high[2] = {q[2], q[3]};
      AddTile(low, 2 * at, kHalfLanesApart, x, scales, sums);
      AddTile(high, 2 * at + 1, kHalfLanesApart, x, scales, sums);
    }
  }
};

struct Q5KProduct {
  static constexpr int64_t kValues = 256, kBytes = 176;
  static constexpr WordOrder kOrder = WordOrder::kHalvesApart;
  template <bool kAll, int N>
  static CARREL_VNNI_ATTR HWY_INLINE void AddChunk(const Blocks<kAll>& blocks,
                                                   const PackedChunk* const (&x)[N],
                                                   RowSums<N>& sums) {
    const BitsTag d;
    const uint8_t* block = blocks.first;
    const SixBitScales six(block + 4);
    GroupVec scales[N];
    ScaleGroups(hn::Mul(SetHalf(block, 1), six.scales), x, scales);
    AddMinima(hn::Mul(SetHalf(block + 2, -1), six.minima), x, sums);
    // Bit g of a byte belongs to group g; the lowest two to those of this tile and of the next.
    BitsVec bits = Shifted32(block + 16);
    const BitsVec sixteen = hn::Set(d, uint16_t{0x1010});
    CARREL_UNROLL
    for (int64_t at = 0; at < 128 / (4 * kLanes); ++at) {
      const BitsVec nibbles = hn::BitCast(d, hn::LoadU(ByteTag(), block + 48 + at * 4 * kLanes));
      WordVec low[2], high[2];
      Halves(hn::Or(LowNibbles(nibbles), hn::And(hn::ShiftLeft<4>(bits), sixteen)), low);
      Halves(hn::Or(HighNibbles(nibbles), hn::And(hn::ShiftLeft<3>(bits), sixteen)), high);
      AddTile(low, 2 * at, kHalfLanesApart, x, scales, sums);
      AddTile(high, 2 * at + 1, kHalfLanesApart, x, scales, sums);
      bits = hn::ShiftRight<kLanes / 4>(bits);
    }
  }
};

// 16 scales, of 16 numbers each, in two vectors.
struct Q6KProduct {
  static constexpr int64_t kValues = 256, kBytes = 210;
  static constexpr WordOrder kOrder = WordOrder::kHalves;
  template <bool kAll, int N>
  static CARREL_VNNI_ATTR HWY_INLINE void AddChunk(const Blocks<kAll>& blocks,
                                                   const PackedChunk* const (&x)[N],
                                                   RowSums<N>& sums) {
    const BitsTag d;
    const GroupTag dg;
    const uint8_t* block = blocks.first;
    const GroupVec step = SetHalf(block + 208, 1);
    const GroupVec first = hn::Mul(step, Scales(block + 192));
    const GroupVec last = hn::Mul(step, Scales(block + 200));
    FloatVec scales[N][16 / kLanes];
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      const GroupVec offset = hn::Set(dg, -32.0f);
      const auto sum = [&](GroupVec scale, int64_t at) HWY_ATTR {
        sums.minima[h] =
            hn::MulAdd(hn::Mul(scale, offset), hn::LoadU(dg, x[h]->half_sums + at), sums.minima[h]);
      };
      sum(first, 0);
      sum(last, 8);
      const GroupVec by_group = hn::LoadU(dg, x[h]->scales);
#if HWY_TARGET <= HWY_AVX3
      scales[h][0] = hn::Mul(hn::Combine(FloatTag(), last, first),
                             SpreadGroups(FloatTag(), by_group, kPairLanes));
#else
      scales[h][0] = hn::Mul(first, SpreadGroups(FloatTag(), by_group, kPairLanes));
      scales[h][1] = hn::Mul(last, SpreadGroups(FloatTag(), by_group, kPairLanes + 8));
#endif
    }
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
      Add(low, low_tile, x, scales, sums);
      Add(high, high_tile, x, scales, sums);
    }
  }

 private:
  static HWY_INLINE GroupVec Scales(const uint8_t* at) {
    const hn::FixedTag<int8_t, 8> d;
    const hn::RebindToSigned<GroupTag> d32;
    return hn::ConvertTo(GroupTag(),
                         hn::PromoteTo(d32, hn::LoadU(d, reinterpret_cast<const int8_t*>(at))));
  }
  template <int N>
  static CARREL_VNNI_ATTR HWY_INLINE void Add(const WordVec (&q)[2], int64_t tile,
                                              const PackedChunk* const (&x)[N],
                                              const FloatVec (&scales)[N][16 / kLanes],
                                              RowSums<N>& sums) {
    FloatVec factors[N];
    // Four lanes to a scale.
    const int64_t in_vector = 64 / (16 / kLanes) / kLanes;
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      factors[h] = hn::TableLookupLanes(
          scales[h][tile / in_vector],
          hn::SetTableIndices(FloatTag(), kFourLanes + tile % in_vector * kLanes));
    }
    AddTile(q, tile, x, factors, sums);
  }
};

// The hardware sees the stream by itself, but stops at each page. Asking for what lies behind the
// last row is harmless. Into the L2 cache: the few places where the L1 cache notes what it waits for
// are left to the lines that are needed now (a tenth to a fifth of the time).
HWY_INLINE void Ahead(const uint8_t* at) { __builtin_prefetch(at + 4096, 0, 2); }

// One row with N inputs, `stride` chunks apart.
template <class Product, int N>
CARREL_VNNI_ATTR HWY_INLINE void MultiplyRow(const uint8_t* row, int64_t in, const PackedChunk* x,
                                             int64_t stride, FloatVec (&out)[N]) {
  const FloatTag d;
  RowSums<N> sums;
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) {
    sums.products[h] = hn::Zero(d);
    sums.minima[h] = hn::Zero(GroupTag());
  }
  constexpr int64_t kBytes = kChunkValues / Product::kValues * Product::kBytes;
  const int64_t chunks = in / kChunkValues;
  const PackedChunk* at[N];
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) at[h] = x + h * stride;
  for (int64_t i = 0; i < chunks; ++i) {
    CARREL_UNROLL
    for (int64_t b = 0; b < kBytes; b += 64) Ahead(row + b);
    Product::AddChunk(Blocks<true>{row, Product::kBytes, 8}, at, sums);
    row += kBytes;
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) ++at[h];
  }
  if constexpr (Product::kValues < kChunkValues) {
    const int64_t left = in % kChunkValues / Product::kValues;
    if (left > 0) Product::AddChunk(Blocks<false>{row, Product::kBytes, left}, at, sums);
  }
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) {
#if HWY_TARGET <= HWY_AVX3
    out[h] = hn::Add(sums.products[h], hn::ZeroExtendVector(d, sums.minima[h]));
#else
    out[h] = hn::Add(sums.products[h], sums.minima[h]);
#endif
  }
}

// y[h, o] of N inputs with rows [0, count).
template <class Product, int N>
CARREL_VNNI_ATTR HWY_NOINLINE void MultiplyRows(const uint8_t* rows, int64_t in, int64_t count,
                                                const PackedChunk* x, int64_t stride, float* y,
                                                int64_t y_stride) {
  const int64_t row_bytes = in / Product::kValues * Product::kBytes;
  for (int64_t j = 0; j < count; j += 4) {
    const int64_t real = std::min<int64_t>(4, count - j);
    FloatVec sums[4][N];
    for (int64_t r = 0; r < 4; ++r) {
      // A last group of fewer than four repeats its last row.
      const uint8_t* row = rows + (j + std::min(r, real - 1)) * row_bytes;
      MultiplyRow<Product, N>(row, in, x, stride, sums[r]);
    }
    for (int h = 0; h < N; ++h) {
      float four[4];
      SumOfLanes4(sums[0][h], sums[1][h], sums[2][h], sums[3][h], four);
      for (int64_t r = 0; r < real; ++r) y[h * y_stride + j + r] = four[r];
    }
  }
}

// A vector of inputs that meet a row at a time: what they need must fit 32 or 16 registers.
inline constexpr int64_t kInputs = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

template <class Product>
HWY_INLINE void MultiplyInputs(const uint8_t* rows, int64_t in, int64_t count, int64_t n,
                               const PackedChunk* packed, float* y, int64_t y_stride) {
  const int64_t stride = PackedChunks(in);
  int64_t i = 0;
  for (; i + kInputs <= n; i += kInputs) {
    MultiplyRows<Product, kInputs>(rows, in, count, packed + i * stride, stride, y + i * y_stride,
                                   y_stride);
  }
  for (; i + 2 <= n; i += 2) {
    MultiplyRows<Product, 2>(rows, in, count, packed + i * stride, stride, y + i * y_stride,
                             y_stride);
  }
  if (i < n) {
    MultiplyRows<Product, 1>(rows, in, count, packed + i * stride, stride, y + i * y_stride,
                             y_stride);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
