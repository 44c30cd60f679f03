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

#include "hwy/cache_control.h"
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

// Small numbers of a row, one vector per quarter or half of a tile.
template <int kVectors, int N>
CARREL_VNNI_ATTR HWY_INLINE void AddTile(const WordVec (&q)[kVectors], int64_t tile,
                                         const int32_t* lanes, const PackedChunk* const (&x)[N],
                                         const GroupVec (&scales)[N], RowSums<N>& sums) {
  const FloatTag d;
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) {
    const int16_t* words = x[h]->words + tile * kVectors * kVectorWords;
    SumVec sum = hn::Zero(SumTag());
    CARREL_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      sum = AddPairs(sum, q[i], LoadWords(words + i * kVectorWords));
    }
    sums.products[h] = hn::MulAdd(
        hn::ConvertTo(d, sum), SpreadGroups(d, scales[h], lanes + tile * kLanes), sums.products[h]);
  }
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
HWY_INLINE void Halves(BitsVec bytes, WordVec (&q)[2]) {
  const BitsTag d;
  const WordTag dw;
  q[0] = hn::BitCast(dw, hn::And(bytes, hn::Set(d, uint16_t{255})));
  q[1] = hn::BitCast(dw, hn::ShiftRight<8>(bytes));
}

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
      const WordVec bytes = hn::BitCast(WordTag(), blocks.Pieces32(tile, 2));
      const WordVec q[2] = {hn::ShiftRight<8>(hn::ShiftLeft<8>(bytes)), hn::ShiftRight<8>(bytes)};
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
  const int64_t chunks = in / kChunkValues;
  const PackedChunk* at[N];
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) at[h] = x + h * stride;
  for (int64_t i = 0; i < chunks; ++i) {
    Product::AddChunk(Blocks<true>{row, Product::kBytes, 8}, at, sums);
    row += kChunkValues / Product::kValues * Product::kBytes;
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

// The hardware sees the stream by itself, but stops at each page. Asking for what lies behind the
// last row is harmless.
inline constexpr int64_t kQuantizedPrefetchBytes = 4096;

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
      for (int64_t b = 0; b < row_bytes; b += 64) {
        hwy::Prefetch(row + b + kQuantizedPrefetchBytes);
      }
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
HWY_INLINE void MultiplyInputs(const uint8_t* rows, int64_t in, int64_t count, const float* x,
                               int64_t n, int64_t x_stride, PackedChunk* packed, float* y,
                               int64_t y_stride) {
  const int64_t stride = PackedChunks(in);
  for (int64_t i = 0; i < n; ++i) {
    PackInput(x + i * x_stride, in, Product::kOrder, packed + i * stride);
  }
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
