// What:   products of many tokens with quantised rows: rows become panels of 16-bit words once, which
//         all tokens are multiplied with.
// Math:   y[i, o] = sum_g d[o, g] s[i, g] sum_{c in g} q[o, c] word[i, c] + m[o, g] t[i, g], g a group
//         of 32 columns, s and t the scale and sum of the token's words (packed_input-inl.h). Sums of
//         words are exact in 32 bits: |q| is at most 128, or, where each 16 numbers have a scale of 8
//         bits that q is multiplied with first, 4096; there words have 15 bits (kFoldedTop).
// Shapes: a panel is two vectors of rows: [groups][16 pairs of words][rows][2], scales and minima
//         [groups][rows]. Inputs are packed in WordOrder::kGroups. Rows lie in lanes, so that no sum
//         crosses them.
// Threads: a token's value does not depend on the tokens beside it, nor on where rows were cut.
// Cost:   AVX-512 with VNNI: 32 multiply-adds an instruction, and 3 or 4 instructions more for every
//         16; AVX2 two instructions for 16. A panel's row is made in some 0.06 ns per number. With AMX
//         panels are of bytes (byte_panel-inl.h).
#if defined(CARREL_KERNELS_WORD_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_WORD_PANEL_INL_H_
#undef CARREL_KERNELS_WORD_PANEL_INL_H_
#else
#define CARREL_KERNELS_WORD_PANEL_INL_H_
#endif

#include <algorithm>

#include "kernels/layer/quantized_linear/lane_rows-inl.h"
#include "kernels/layer/quantized_linear/multiply_blocks-inl.h"
#include "kernels/read_ahead.h"

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// Tokens that meet a panel at a time: two vectors of integers each.
inline constexpr int kPanelTokens = HWY_TARGET <= HWY_AVX3 ? 6 : 4;

// Groups lie chain by chain (row_sums-inl.h), in the order in which they are added up.
struct WordPanel {
  int16_t* words;
  float* scales;
  float* minima;
  int64_t groups;

  // Where a vector of rows from `first` on puts what stands in place `at`.
  HWY_INLINE GroupPlace Place(int64_t at, int64_t first) const {
    at *= kPanelOut;
    return {words + (at * kPairs + first) * 2, scales + at + first, minima + at + first};
  }
};

// `real` <= kPanelOut rows, the last one again for those that are missing.
template <class Product, class Panel>
CARREL_VNNI_ATTR HWY_NOINLINE void FillPanel(const uint8_t* rows, int64_t in, int64_t real,
                                             const Panel& panel) {
  constexpr int64_t kChunkBytes = kChunkValues / Product::kValues * Product::kBytes;
  const int64_t row_bytes = in / Product::kValues * Product::kBytes;
  for (int64_t first = 0; first < kPanelOut; first += kLanes) {
    LaneRows lanes;
    for (int64_t r = 0; r < kLanes; ++r)
      lanes.at[r] = rows + std::min(first + r, real - 1) * row_bytes;
    for (int64_t begin = 0; begin < panel.groups; begin += kChunkGroups) {
      const auto place = [&](int64_t g) HWY_ATTR {
        return panel.Place(PlaceInChains(begin + g, panel.groups), first);
      };
      FillChunk(Product(), lanes, std::min(kChunkGroups, panel.groups - begin), place);
      for (int64_t r = 0; r < kLanes; ++r) lanes.at[r] += kChunkBytes;
    }
  }
}

HWY_INLINE WordVec PairOf(const int16_t* words) {
  int32_t pair;
  std::memcpy(&pair, words, sizeof(pair));
  return hn::BitCast(WordTag(), hn::Set(SumTag(), pair));
}

// What tokens have summed up with the rows of a panel. Of 16 registers the integers need most, and a
// compiler chooses the wrong ones: there sums lie in memory.
template <int kTokens>
struct PanelSums {
#if HWY_TARGET <= HWY_AVX3
  FloatVec vectors[kTokens][2];
  HWY_INLINE FloatVec Get(int t, int k) const { return vectors[t][k]; }
  HWY_INLINE void Set(int t, int k, FloatVec sum) { vectors[t][k] = sum; }
#else
  alignas(64) float numbers[kTokens * kPanelOut];
  HWY_INLINE FloatVec Get(int t, int k) const {
    return hn::Load(FloatTag(), numbers + t * kPanelOut + k * kLanes);
  }
  HWY_INLINE void Set(int t, int k, FloatVec sum) {
    hn::Store(sum, FloatTag(), numbers + t * kPanelOut + k * kLanes);
  }
#endif
};

// Of a next panel's rows, no more is asked for while tokens meet this one: they share the L2 cache with
// it. Filling reads 16 rows side by side, which no hardware foresees, and would wait for memory at each.
inline constexpr int64_t kMostAheadBytes = 128 << 10;

// From a word of one token's chunk to that of the next chunk.
inline constexpr int64_t kChunkStride = sizeof(PackedChunk) / sizeof(int16_t);

// The groups [begin, end) of a panel, a chain, for kTokens tokens that are `chunks` apart.
template <bool kMinimum, int kTokens>
CARREL_VNNI_ATTR HWY_INLINE void MultiplyChain(const WordPanel& panel, int64_t begin, int64_t end,
                                               const PackedChunk* x, int64_t chunks,
                                               PanelSums<kTokens>& sums, LinesAhead& next) {
  const FloatTag d;
  CARREL_UNROLL
  for (int t = 0; t < kTokens; ++t) {
    sums.Set(t, 0, hn::Zero(d));
    sums.Set(t, 1, hn::Zero(d));
  }
  const int16_t* words = panel.words + begin * kPairs * kPanelOut * 2;
  for (int64_t group = begin; group < end; ++group) {
    next.AskForSome();
    SumVec exact[kTokens][2];
    CARREL_UNROLL
    for (int t = 0; t < kTokens; ++t) exact[t][0] = exact[t][1] = hn::Zero(SumTag());
    const PackedChunk* chunk = x + group / kChunkGroups;
    const int64_t g = group % kChunkGroups;
    const int16_t* pairs = chunk->words + g * 2 * kPairs;
    for (int64_t p = 0; p < kPairs; ++p, words += 2 * kVectorWords) {
      const WordVec first = LoadWords(words), next = LoadWords(words + kVectorWords);
      CARREL_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const WordVec pair = PairOf(pairs + t * chunks * kChunkStride + 2 * p);
        exact[t][0] = AddPairs(exact[t][0], first, pair);
        exact[t][1] = AddPairs(exact[t][1], next, pair);
      }
    }
    CARREL_UNROLL
    for (int k = 0; k < 2; ++k) {
      const FloatVec scale = hn::LoadU(d, panel.scales + group * kPanelOut + k * kLanes);
      FloatVec minimum = hn::Zero(d);
      if constexpr (kMinimum) {
        minimum = hn::LoadU(d, panel.minima + group * kPanelOut + k * kLanes);
      }
      CARREL_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const FloatVec both = hn::Mul(scale, hn::Set(d, chunk[t * chunks].scales[g]));
        FloatVec sum = hn::MulAdd(hn::ConvertTo(d, exact[t][k]), both, sums.Get(t, k));
        if constexpr (kMinimum) {
          sum = hn::MulAdd(minimum, hn::Set(d, chunk[t * chunks].sums[g]), sum);
        }
        sums.Set(t, k, sum);
      }
    }
  }
}

// kTokens tokens, `chunks` apart, with the `real` rows of a panel.
template <bool kMinimum, int kTokens>
CARREL_VNNI_ATTR HWY_NOINLINE void MultiplyTokens(const WordPanel& panel, const PackedChunk* x,
                                                  int64_t chunks, int64_t real, float* y,
                                                  int64_t y_stride, LinesAhead& next) {
  const FloatTag d;
  alignas(64) float totals[kTokens][kPanelOut];
  for (int64_t chain = 0, begin = 0; chain < kChains; ++chain) {
    const int64_t end = begin + (panel.groups - chain + kChains - 1) / kChains;
    PanelSums<kTokens> sums;
    MultiplyChain<kMinimum>(panel, begin, end, x, chunks, sums, next);
    begin = end;
    CARREL_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      CARREL_UNROLL
      for (int k = 0; k < 2; ++k) {
        float* total = totals[t] + k * kLanes;
        const FloatVec sum = sums.Get(t, k);
        hn::Store(chain == 0 ? sum : hn::Add(hn::Load(d, total), sum), d, total);
      }
    }
  }
  for (int64_t t = 0; t < kTokens; ++t) std::copy_n(totals[t], real, y + t * y_stride);
}

// multiply(begin, count, o, real, next): so many tokens with the panel, which holds `real` rows from o on.
// Passes are of like numbers of tokens: one of few costs nearly as many loads as one of many. asks: how
// often a pass asks for what is `next`.
template <class Product, class Panel, class Multiply>
HWY_INLINE void ForEachPanel(const uint8_t* rows, int64_t in, int64_t out, int64_t n,
                             int64_t most_tokens, const Panel& panel, int64_t asks,
                             const Multiply& multiply) {
  const int64_t row_bytes = in / Product::kValues * Product::kBytes;
  const int64_t all_passes = (n + most_tokens - 1) / most_tokens;
  for (int64_t o = 0; o < out; o += kPanelOut) {
    const int64_t real = std::min(kPanelOut, out - o);
    FillPanel<Product>(rows + o * row_bytes, in, real, panel);
    LinesAhead next(rows + (o + kPanelOut) * row_bytes,
                    std::min(kPanelOut * row_bytes, kMostAheadBytes), all_passes * asks);
    for (int64_t i = 0; i < n;) {
      const int64_t passes = (n - i + most_tokens - 1) / most_tokens;
      const int64_t count = (n - i + passes - 1) / passes;
      multiply(i, count, o, real, next);
      i += count;
    }
  }
}

// y [n, out] of n tokens in WordOrder::kGroups; room: 16 floats for each of `in` and 2 more, aligned.
template <class Product>
void MultiplyByPanels(const uint8_t* rows, int64_t in, int64_t out, int64_t n,
                      const PackedChunk* packed, float* y, int64_t y_stride, float* room) {
  const int64_t groups = in / 32, chunks = PackedChunks(in);
  const WordPanel panel = {reinterpret_cast<int16_t*>(room), room + groups * kPairs * kPanelOut,
                           room + groups * (kPairs + 1) * kPanelOut, groups};
  ForEachPanel<Product>(
      rows, in, out, n, kPanelTokens, panel, groups,
      [&](int64_t begin, int64_t count, int64_t o, int64_t real, LinesAhead& next) HWY_ATTR {
        WithCount<kPanelTokens>(count, [&]<int kTokens>(
                                           std::integral_constant<int, kTokens>) HWY_ATTR {
          MultiplyTokens<Product::kMinimum, kTokens>(panel, packed + begin * chunks, chunks, real,
                                                     y + begin * y_stride + o, y_stride, next);
        });
      });
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
