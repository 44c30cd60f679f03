// What:   numbers that quantised rows are multiplied with, in 16 bits: 32 share a scale.
// Math:   x[c] ~ scale * word, word = round(x[c] / scale), scale = max |x| / 32767 over the 32.
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

#include "kernels/quantized_linear/packed_chunk.h"
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
};

// First word of quarter q of group g.
HWY_INLINE int64_t QuarterOffset(WordOrder order, int64_t g, int64_t q) {
  if (order == WordOrder::kQuarters) {
    const int64_t tile = kVectorWords / 8;
    return g / tile * tile * 32 + q * kVectorWords + g % tile * 8;
  }
  const int64_t tile = kVectorWords / 16;
  const int64_t place =
      order == WordOrder::kHalvesApart && tile == 2 ? g / 4 * 4 + g % 2 * 2 + g % 4 / 2 : g;
  return place / tile * tile * 32 + q % 2 * kVectorWords + place % tile * 16 + q / 2 * 8;
}

// 32 numbers as group g of a chunk.
HWY_INLINE void PackGroup(const float* x, WordOrder order, int64_t g, PackedChunk& chunk) {
  const hn::CappedTag<float, 8> d;
  const hn::RebindToSigned<decltype(d)> di;
  const hn::Rebind<int16_t, decltype(d)> dw;
  const auto a = hn::LoadU(d, x), b = hn::LoadU(d, x + 8);
  const auto c = hn::LoadU(d, x + 16), e = hn::LoadU(d, x + 24);
  const auto most = hn::Max(hn::Max(hn::Abs(a), hn::Abs(b)), hn::Max(hn::Abs(c), hn::Abs(e)));
  const float largest = hn::GetLane(hn::MaxOfLanes(d, most));
  // Zero; NaN if a number is infinite or NaN, which the maximum may miss.
  const auto none = hn::Zero(d);
  const auto zero = hn::MulAdd(a, none, hn::MulAdd(b, none, hn::MulAdd(c, none, hn::Mul(e, none))));
  const float nothing = hn::GetLane(hn::SumOfLanes(d, zero));
  const float scale = largest / 32767 + nothing;
  const auto factor = hn::Set(d, largest > 1e-30f ? 32767 / largest : 0.0f);
  const auto ia = hn::NearestInt(hn::Mul(a, factor)), ib = hn::NearestInt(hn::Mul(b, factor));
  const auto ic = hn::NearestInt(hn::Mul(c, factor)), ie = hn::NearestInt(hn::Mul(e, factor));
  const auto store = [&](int64_t quarter, auto words) HWY_ATTR {
    hn::StoreU(hn::DemoteTo(dw, words), dw, chunk.words + QuarterOffset(order, g, quarter));
  };
  store(0, hn::ConcatEven(di, ib, ia));
  store(1, hn::ConcatOdd(di, ib, ia));
  store(2, hn::ConcatEven(di, ie, ic));
  store(3, hn::ConcatOdd(di, ie, ic));
  const int32_t first = hn::GetLane(hn::SumOfLanes(di, hn::Add(ia, ib)));
  const int32_t last = hn::GetLane(hn::SumOfLanes(di, hn::Add(ic, ie)));
  chunk.scales[g] = scale;
  chunk.sums[g] = scale * static_cast<float>(first + last);
  chunk.half_sums[2 * g] = scale * static_cast<float>(first);
  chunk.half_sums[2 * g + 1] = scale * static_cast<float>(last);
}

// `in` numbers, a multiple of 32, into PackedChunks(in) chunks.
inline void PackInput(const float* x, int64_t in, WordOrder order, PackedChunk* chunks) {
  const int64_t groups = in / 32;
  if (in % kChunkValues != 0) chunks[in / kChunkValues] = PackedChunk();
  for (int64_t g = 0; g < groups; ++g) {
    PackGroup(x + 32 * g, order, g % kChunkGroups, chunks[g / kChunkGroups]);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
