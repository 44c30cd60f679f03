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

// How the quarters of 8 groups lie in a chunk.
enum class WordOrder : uint8_t {
  // A tile is kVectorWords / 8 groups: a vector of their first quarters, of their second, ...
  kQuarters,
  // A tile is kVectorWords / 16 groups: a vector of their even words, a vector of their odd ones.
  kHalves,
  // The same, but groups 0 and 2, 1 and 3, 4 and 6, 5 and 7 lie together where a tile has two.
  kHalvesApart,
  // Group by group, the four quarters of each side by side (word_panel-inl.h).
  kGroups,
};

// What the largest of 32 numbers becomes, and where weights of a panel come multiplied by a scale.
inline constexpr float kTop = 32767;
inline constexpr float kFoldedTop = 16383;

// First word of quarter q of group g.
HWY_INLINE int64_t QuarterOffset(WordOrder order, int64_t g, int64_t q) {
  if (order == WordOrder::kGroups) return g * 32 + q * 8;
  if (order == WordOrder::kQuarters) {
    const int64_t tile = kVectorWords / 8;
    return g / tile * tile * 32 + q * kVectorWords + g % tile * 8;
  }
  const int64_t tile = kVectorWords / 16;
  const int64_t place =
      order == WordOrder::kHalvesApart && tile == 2 ? g / 4 * 4 + g % 2 * 2 + g % 4 / 2 : g;
  return place / tile * tile * 32 + q % 2 * kVectorWords + place % tile * 16 + q / 2 * 8;
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

// Group g of a chunk; sums: those of the words of its first 16 numbers and of its last, by lane.
HWY_INLINE void PackGroup(const float* x, float factor, WordOrder order, int64_t g, int16_t* out,
                          PackVec (&sums)[2]) {
  const PackTag d;
  const hn::RebindToSigned<PackTag> di;
  const hn::Rebind<int16_t, PackTag> dw;
  const PackVec by = hn::Set(d, factor);
  const auto number = [&](int64_t at)
                          HWY_ATTR { return hn::NearestInt(hn::Mul(hn::LoadU(d, x + at), by)); };
  for (int half = 0; half < 2; ++half) {
    const auto a = number(16 * half), b = number(16 * half + 8);
    hn::StoreU(hn::DemoteTo(dw, hn::ConcatEven(di, b, a)), dw,
               out + QuarterOffset(order, g, 2 * half));
    hn::StoreU(hn::DemoteTo(dw, hn::ConcatOdd(di, b, a)), dw,
               out + QuarterOffset(order, g, 2 * half + 1));
    sums[half] = hn::ConvertTo(d, hn::Add(a, b));
  }
}

// `in` numbers, a multiple of 32, into PackedChunks(in) chunks.
template <WordOrder kOrder>
inline void PackInput(const float* x, int64_t in, float top, PackedChunk* chunks) {
  alignas(32) static constexpr float kZeros[32] = {};
  const int64_t groups = in / 32;
  for (int64_t first = 0; first < PackedChunks(in) * kChunkGroups; first += 4) {
    PackedChunk& chunk = chunks[first / kChunkGroups];
    const int64_t at = first % kChunkGroups;
    const float* group[4];
    for (int k = 0; k < 4; ++k) group[k] = first + k < groups ? x + 32 * (first + k) : kZeros;
    float factors[4];
    ScaleFour(group, top, chunk.scales + at, factors);
    for (int k = 0; k < 4; k += 2) {
      PackVec a[2], b[2];
      PackGroup(group[k], factors[k], kOrder, at + k, chunk.words, a);
      PackGroup(group[k + 1], factors[k + 1], kOrder, at + k + 1, chunk.words, b);
      float* halves = chunk.half_sums + 2 * (at + k);
      SumOfLanes4(a[0], a[1], b[0], b[1], halves);
      for (int i = 0; i < 2; ++i) {
        const float scale = chunk.scales[at + k + i];
        chunk.sums[at + k + i] = scale * (halves[2 * i] + halves[2 * i + 1]);
        halves[2 * i] *= scale;
        halves[2 * i + 1] *= scale;
      }
    }
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
