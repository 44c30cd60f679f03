// What:   numbers that quantised rows are multiplied with, in 16 bits: 32 share a scale.
// Math:   x[c] ~ scale * word, word = round(x[c] / scale), scale = max |x| / top over the 32.
// Shapes: chunks of 256 numbers = 8 groups of 32; a last chunk is filled up with zeros. A group is
//         cut into quarters of 8 words: the even ones of its first 16 numbers, the odd ones, and the
//         same of its last 16. For bytes b of a row read as words of 16 bits, (b & 15) then meets
//         one quarter, (b >> 8) & 15 another, and no weight has to change its lane.
#if defined(CARREL_KERNELS_PACKED_INPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_PACKED_INPUT_INL_H_
#undef CARREL_KERNELS_PACKED_INPUT_INL_H_
#else
#define CARREL_KERNELS_PACKED_INPUT_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "kernels/layer/quantized_linear/packed_chunk.h"
#include "kernels/simd_math-inl.h"

// Blocks are read in place where a vector has 8 or 16 floats; other machines widen rows first.
#undef CARREL_BLOCK_PRODUCTS
#define CARREL_BLOCK_PRODUCTS (HWY_TARGET <= HWY_AVX2)

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// Vectors of 16-bit words, as wide as the machine has them.
inline constexpr int64_t kVectorWords = HWY_LANES(int16_t);

// How the quarters of 8 groups lie in a chunk. A tile is kVectorWords / 8 groups: a vector of their
// first quarters, of their second, .. Tiles of four groups differ in which these are.
enum class WordOrder : uint8_t {
  kQuarters,  // one after the other
  kEvenOdd,   // even ones in one tile, odd ones in the next, of four (AVX2) or eight
  kPairs,     // 0, 1, 4, 5 in one tile, 2, 3, 6, 7 in the next
  // Not tiles, but group by group, the four quarters of each side by side (word_panel-inl.h).
  kGroups,
};

// What the largest of 32 numbers becomes, and where weights of a panel come multiplied by a scale.
inline constexpr float kTop = 32767;
inline constexpr float kFoldedTop = 16383;

inline constexpr int64_t kTileGroups = kVectorWords / 8;

// Where group g stands among those of all tiles.
constexpr int64_t PlaceInTiles(WordOrder order, int64_t g) {
  if (order == WordOrder::kEvenOdd) {
    const int64_t of = 2 * kTileGroups;
    return g / of * of + g % 2 * kTileGroups + g % of / 2;
  }
  if (order == WordOrder::kPairs && kTileGroups == 4) return g % 4 / 2 * 4 + g / 4 * 2 + g % 2;
  return g;
}

// First word of quarter q of group g.
HWY_INLINE int64_t QuarterOffset(WordOrder order, int64_t g, int64_t q) {
  if (order == WordOrder::kGroups) return g * 32 + q * 8;
  const int64_t place = PlaceInTiles(order, g);
  return place / kTileGroups * kTileGroups * 32 + q * kVectorWords + place % kTileGroups * 8;
}

// Where group g of `groups` stands if they lie chain by chain: a chain is every eighth group
// (row_sums-inl.h).
constexpr int64_t PlaceInChains(int64_t g, int64_t groups) {
  const int64_t chain = g % kChunkGroups;
  return chain * (groups / kChunkGroups) + std::min(chain, groups % kChunkGroups) +
         g / kChunkGroups;
}

// Where a half of group g stands among those of a chunk in WordOrder::kPairs, once they have been
// added up (row_sums-inl.h).
constexpr int64_t HalfLane(int64_t g, int64_t half) {
  return g / 4 * 8 + g % 2 * 4 + g / 2 % 2 * 2 + half;
}

using PackTag = hn::CappedTag<float, 8>;
using PackVec = hn::Vec<PackTag>;
using FourTag = hn::FixedTag<float, 4>;

// The largest lane of each of four vectors of absolute values. As integers their order is the same,
// but that NaN is the largest of all.
HWY_INLINE hn::Vec<FourTag> LargestOf4(PackVec a, PackVec b, PackVec c, PackVec e) {
  const hn::RebindToSigned<PackTag> d;
  const hn::RepartitionToWide<decltype(d)> dw;
  const auto of_pairs = [&](auto x, auto y) HWY_ATTR {
    return hn::Max(hn::InterleaveLower(d, x, y), hn::InterleaveUpper(d, x, y));
  };
  const auto ab = hn::BitCast(dw, of_pairs(hn::BitCast(d, a), hn::BitCast(d, b)));
  const auto ce = hn::BitCast(dw, of_pairs(hn::BitCast(d, c), hn::BitCast(d, e)));
  const auto all = hn::Max(hn::BitCast(d, hn::InterleaveLower(dw, ab, ce)),
                           hn::BitCast(d, hn::InterleaveUpper(dw, ab, ce)));
  const hn::Half<decltype(d)> d4;
  return hn::BitCast(FourTag(), hn::Max(hn::LowerHalf(d4, all), hn::UpperHalf(d4, all)));
}

// Scales of four groups, and what numbers are multiplied with.
HWY_INLINE void ScaleFour(const float* const (&x)[4], float most_word, float* scales,
                          float* factors) {
  const PackTag d;
  const FourTag d4;
  PackVec most[4];
  for (int k = 0; k < 4; ++k) {
    const hn::RebindToSigned<PackTag> di;
    const auto bits = [&](int64_t at)
                          HWY_ATTR { return hn::BitCast(di, hn::Abs(hn::LoadU(d, x[k] + at))); };
    most[k] = hn::BitCast(d, hn::Max(hn::Max(bits(0), bits(8)), hn::Max(bits(16), bits(24))));
  }
  const auto largest = LargestOf4(most[0], most[1], most[2], most[3]);
  const auto top = hn::Set(d4, most_word), zero = hn::Zero(d4);
  // Infinity - infinity and NaN - NaN are NaN.
  const auto scale = hn::Add(hn::Div(largest, top), hn::Sub(largest, largest));
  const auto usual = hn::Gt(largest, hn::Set(d4, 1e-30f));
  hn::StoreU(scale, d4, scales);
  hn::StoreU(hn::IfThenElse(usual, hn::Div(top, largest), zero), d4, factors);
}

// Group g of a chunk; the sum of its words, by lane.
HWY_INLINE PackVec PackGroup(const float* x, float factor, WordOrder order, int64_t g,
                             int16_t* out) {
  const PackTag d;
  const hn::RebindToSigned<PackTag> di;
  const hn::Rebind<int16_t, PackTag> dw;
  const PackVec by = hn::Set(d, factor);
  const auto number = [&](int64_t at)
                          HWY_ATTR { return hn::NearestInt(hn::Mul(hn::LoadU(d, x + at), by)); };
  auto sum = hn::Zero(di);
  for (int half = 0; half < 2; ++half) {
    const auto a = number(16 * half), b = number(16 * half + 8);
    hn::StoreU(hn::DemoteTo(dw, hn::ConcatEven(di, b, a)), dw,
               out + QuarterOffset(order, g, 2 * half));
    hn::StoreU(hn::DemoteTo(dw, hn::ConcatOdd(di, b, a)), dw,
               out + QuarterOffset(order, g, 2 * half + 1));
    sum = hn::Add(sum, hn::Add(a, b));
  }
  return hn::ConvertTo(d, sum);
}

// What numbers that count from -32 are to be added for: 32 times the words they meet.
HWY_INLINE void SumHalves(PackedChunk& chunk) {
  const hn::FixedTag<int16_t, 8> dw;
  const hn::FixedTag<int32_t, 8> d;
  for (int64_t g = 0; g < kChunkGroups; ++g) {
    for (int64_t half = 0; half < 2; ++half) {
      const auto quarter = [&](int64_t q) HWY_ATTR {
        const int16_t* words = chunk.words + QuarterOffset(WordOrder::kPairs, g, q);
        return hn::PromoteTo(d, hn::LoadU(dw, words));
      };
      const auto sum = hn::SumOfLanes(d, hn::Add(quarter(2 * half), quarter(2 * half + 1)));
      chunk.half_sums[HalfLane(g, half)] = 32 * hn::GetLane(sum);
    }
  }
}

// Groups [first, first + 8) of `groups`, zeros where there are no more.
template <WordOrder kOrder>
HWY_INLINE void PackChunk(const float* x, int64_t first, int64_t groups, float top,
                          PackedChunk& chunk) {
  alignas(32) static constexpr float kZeros[32] = {};
  const FourTag d4;
  for (int64_t at = 0; at < kChunkGroups; at += 4) {
    const float* group[4];
    for (int k = 0; k < 4; ++k) {
      const int64_t g = first + at + k;
      group[k] = g < groups ? x + 32 * g : kZeros;
    }
    float factors[4];
    ScaleFour(group, top, chunk.scales + at, factors);
    PackVec sums[4];
    for (int k = 0; k < 4; ++k) {
      sums[k] = PackGroup(group[k], factors[k], kOrder, at + k, chunk.words);
    }
    SumOfLanes4(sums[0], sums[1], sums[2], sums[3], chunk.sums + at);
    hn::StoreU(hn::Mul(hn::LoadU(d4, chunk.scales + at), hn::LoadU(d4, chunk.sums + at)), d4,
               chunk.sums + at);
  }
  if (kOrder == WordOrder::kPairs) SumHalves(chunk);
}

// `in` numbers, a multiple of 32, into PackedChunks(in) chunks.
template <WordOrder kOrder>
inline void PackInput(const float* x, int64_t in, float top, PackedChunk* chunks) {
  for (int64_t i = 0; i < PackedChunks(in); ++i) {
    PackChunk<kOrder>(x, i * kChunkGroups, in / 32, top, chunks[i]);
  }
}

// 32 words of a group in WordOrder::kGroups, as they are or as bytes (byte_panel_amx.h).
template <bool kBytes>
HWY_INLINE void CopyGroup(const int16_t* words, int16_t* to) {
#if HWY_TARGET <= HWY_AVX3_DL
  if constexpr (kBytes) {
    alignas(16) static constexpr uint8_t kPlanes[16] = {0, 4, 2, 6, 8, 12, 10, 14,
                                                        1, 5, 3, 7, 9, 13, 11, 15};
    const hn::CappedTag<uint8_t, 64> d;
    const hn::Repartition<uint64_t, decltype(d)> dw;
    const auto all = hn::LoadU(d, reinterpret_cast<const uint8_t*>(words));
    const auto eight = hn::BitCast(dw, hn::TableLookupBytes(all, hn::LoadDup128(d, kPlanes)));
    const auto low = hn::ConcatEven(dw, eight, eight), high = hn::ConcatOdd(dw, eight, eight);
    hn::StoreU(hn::BitCast(d, hn::ConcatLowerLower(dw, high, low)), d,
               reinterpret_cast<uint8_t*>(to));
    return;
  }
#endif
  std::memcpy(to, words, 32 * sizeof(int16_t));
}

// As PackInput, for panels: groups in WordOrder::kGroups, and chain by chain (PlaceInChains).
template <bool kBytes>
inline void PackPanelInput(const float* x, int64_t in, float top, PackedChunk* chunks) {
  const int64_t groups = in / 32;
  PackedChunk chunk;
  for (int64_t first = 0; first < groups; first += kChunkGroups) {
    PackChunk<WordOrder::kGroups>(x, first, groups, top, chunk);
    for (int64_t g = 0; g < std::min(kChunkGroups, groups - first); ++g) {
      const int64_t place = PlaceInChains(first + g, groups);
      PackedChunk& to = chunks[place / kChunkGroups];
      const int64_t at = place % kChunkGroups;
      CopyGroup<kBytes>(chunk.words + g * 32, to.words + at * 32);
      to.scales[at] = chunk.scales[g];
      to.sums[at] = chunk.sums[g];
    }
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
