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
//         16; AVX2 two instructions for 16. A panel's row is made in some 0.3 ns per number.
#if defined(CARREL_KERNELS_WORD_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_WORD_PANEL_INL_H_
#undef CARREL_KERNELS_WORD_PANEL_INL_H_
#else
#define CARREL_KERNELS_WORD_PANEL_INL_H_
#endif

#include <algorithm>

#include "kernels/layer/quantized_linear/large_blocks-inl.h"
#include "kernels/layer/quantized_linear/small_blocks-inl.h"

// With AVX-512 but no VNNI two instructions do what one of fp32 does: nothing would be won.
#undef CARREL_WORD_PANELS
#define CARREL_WORD_PANELS (HWY_TARGET == HWY_AVX2 || HWY_TARGET <= HWY_AVX3_DL)

#if CARREL_WORD_PANELS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

inline constexpr int64_t kPanelOut = 2 * kLanes;
inline constexpr int64_t kPairs = 16;  // of words in a group
// Tokens that meet a panel at a time: two vectors of integers each.
inline constexpr int kPanelTokens = HWY_TARGET <= HWY_AVX3 ? 6 : 4;

// From a word of one token's chunk to that of the next chunk.
inline constexpr int64_t kChunkStride = sizeof(PackedChunk) / sizeof(int16_t);

struct WordPanel {
  int16_t* words;
  float* scales;
  float* minima;
};

// 256 numbers of a row, as its type gives them (a taker, as RowSums is).
struct PanelRow {
  alignas(64) int16_t words[kChunkValues];
  float scales[kChunkGroups];
  float minima[kChunkGroups];
  int8_t bytes[2 * kChunkGroups];  // scales of 16 numbers

  HWY_INLINE void Scale(GroupVec d) { hn::StoreU(d, GroupTag(), scales); }
  HWY_INLINE void Minimum(GroupVec m) { hn::StoreU(m, GroupTag(), minima); }
  HWY_INLINE void ScaleHalves(GroupVec step, const int8_t* of_halves, int /*offset*/) {
    Scale(step);
    std::memcpy(bytes, of_halves, sizeof(bytes));
  }
  template <WordOrder kOrder, int kVectors>
  HWY_INLINE void Tile(const WordVec (&q)[kVectors], int64_t tile) {
    CARREL_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      hn::Store(q[i], WordTag(), words + (tile * kVectors + i) * kVectorWords);
    }
  }
  HWY_INLINE void TileOfHalves(const WordVec (&q)[2], int64_t tile) {
    Tile<WordOrder::kHalves>(q, tile);
  }
};

using QuarterTag = hn::FixedTag<int16_t, 8>;

// Quarter q of group g; kFolded: its numbers, which count from -32, times their scale.
template <class Product>
HWY_INLINE auto QuarterOf(const PanelRow& row, int64_t g, int64_t q) {
  const QuarterTag d;
  auto words = hn::LoadU(d, row.words + QuarterOffset(Product::kOrder, g, q));
  if constexpr (Product::kFolded) {
    const int16_t scale = row.bytes[2 * g + q / 2];
    words = hn::Mul(hn::Sub(words, hn::Set(d, int16_t{32})), hn::Set(d, scale));
  }
  return words;
}

// Rows [first, first + 4) of a panel get one chunk, of which `groups` groups are there.
template <class Product>
HWY_INLINE void PlaceRows(const PanelRow (&rows)[4], int64_t chunk, int64_t groups, int64_t first,
                          const WordPanel& panel) {
  const QuarterTag dw;
  const hn::Repartition<int32_t, QuarterTag> d;
  const hn::Repartition<int64_t, QuarterTag> d64;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t group = chunk * kChunkGroups + g;
    CARREL_UNROLL
    for (int64_t q = 0; q < 4; ++q) {
      const auto pairs = [&](int r)
                             HWY_ATTR { return hn::BitCast(d, QuarterOf<Product>(rows[r], g, q)); };
      const auto a = pairs(0), b = pairs(1), c = pairs(2), e = pairs(3);
      const auto ab_low = hn::BitCast(d64, hn::InterleaveLower(d, a, b));
      const auto ab_high = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
      const auto ce_low = hn::BitCast(d64, hn::InterleaveLower(d, c, e));
      const auto ce_high = hn::BitCast(d64, hn::InterleaveUpper(d, c, e));
      int16_t* at = panel.words + ((group * kPairs + q * 4) * kPanelOut + first) * 2;
      const auto put = [&](auto pair, int64_t i) HWY_ATTR {
        hn::StoreU(hn::BitCast(dw, pair), dw, at + i * kPanelOut * 2);
      };
      put(hn::InterleaveLower(d64, ab_low, ce_low), 0);
      put(hn::InterleaveUpper(d64, ab_low, ce_low), 1);
      put(hn::InterleaveLower(d64, ab_high, ce_high), 2);
      put(hn::InterleaveUpper(d64, ab_high, ce_high), 3);
    }
    for (int64_t r = 0; r < 4; ++r) {
      panel.scales[group * kPanelOut + first + r] = rows[r].scales[g];
      if (Product::kMinimum) panel.minima[group * kPanelOut + first + r] = rows[r].minima[g];
    }
  }
}

// `real` <= kPanelOut rows, the last one again for those that are missing.
template <class Product>
CARREL_VNNI_ATTR HWY_NOINLINE void FillPanel(const uint8_t* rows, int64_t in, int64_t real,
                                             const WordPanel& panel) {
  constexpr int64_t kBlocksPerChunk = kChunkValues / Product::kValues;
  constexpr int64_t kChunkBytes = kBlocksPerChunk * Product::kBytes;
  const int64_t row_bytes = in / Product::kValues * Product::kBytes, groups = in / 32;
  PanelRow four[4];
  for (int64_t first = 0; first < kPanelOut; first += 4) {
    for (int64_t chunk = 0; chunk < PackedChunks(in); ++chunk) {
      const int64_t here = std::min(kChunkGroups, groups - chunk * kChunkGroups);
      for (int64_t r = 0; r < 4; ++r) {
        const uint8_t* at = rows + std::min(first + r, real - 1) * row_bytes + chunk * kChunkBytes;
        if (Product::kValues == kChunkValues || here == kChunkGroups) {
          Product::ReadChunk(Blocks<kChunkGroups>{at, Product::kBytes, kChunkGroups}, four[r]);
        } else if constexpr (Product::kValues < kChunkValues) {
          Product::ReadChunk(Blocks<kSomeBlocks>{at, Product::kBytes, here}, four[r]);
        }
      }
      PlaceRows<Product>(four, chunk, here, first, panel);
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
  HWY_INLINE void Write(int64_t real, float* y, int64_t y_stride) const {
    CARREL_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      alignas(64) float all[kPanelOut];
      hn::Store(vectors[t][0], FloatTag(), all);
      hn::Store(vectors[t][1], FloatTag(), all + kLanes);
      std::copy_n(all, real, y + t * y_stride);
    }
  }
#else
  alignas(64) float numbers[kTokens * kPanelOut];
  HWY_INLINE FloatVec Get(int t, int k) const {
    return hn::Load(FloatTag(), numbers + t * kPanelOut + k * kLanes);
  }
  HWY_INLINE void Set(int t, int k, FloatVec sum) {
    hn::Store(sum, FloatTag(), numbers + t * kPanelOut + k * kLanes);
  }
  // Not unrolled: what no loop runs through is put into registers again.
  HWY_INLINE void Write(int64_t real, float* y, int64_t y_stride) const {
    for (int64_t t = 0; t < kTokens; ++t) {
      std::copy_n(numbers + t * kPanelOut, real, y + t * y_stride);
    }
  }
#endif
};

// kTokens tokens, `chunks` apart, with the `real` rows of a panel.
template <bool kMinimum, int kTokens>
CARREL_VNNI_ATTR HWY_NOINLINE void MultiplyTokens(const WordPanel& panel, int64_t groups,
                                                  const PackedChunk* x, int64_t chunks,
                                                  int64_t real, float* y, int64_t y_stride) {
  const FloatTag d;
  PanelSums<kTokens> sums;
  CARREL_UNROLL
  for (int t = 0; t < kTokens; ++t) {
    sums.Set(t, 0, hn::Zero(d));
    sums.Set(t, 1, hn::Zero(d));
  }
  const int16_t* words = panel.words;
  for (int64_t group = 0; group < groups; ++group) {
    const PackedChunk* chunk = x + group / kChunkGroups;
    const int64_t g = group % kChunkGroups;
    SumVec exact[kTokens][2];
    CARREL_UNROLL
    for (int t = 0; t < kTokens; ++t) exact[t][0] = exact[t][1] = hn::Zero(SumTag());
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
  sums.Write(real, y, y_stride);
}

// y [n, out] of n tokens in WordOrder::kGroups; room: WordPanelFloats(in).
template <class Product>
void MultiplyByPanels(const uint8_t* rows, int64_t in, int64_t out, int64_t n,
                      const PackedChunk* packed, float* y, int64_t y_stride, float* room) {
  const int64_t groups = in / 32, chunks = PackedChunks(in);
  const WordPanel panel = {reinterpret_cast<int16_t*>(room), room + groups * kPairs * kPanelOut,
                           room + groups * (kPairs + 1) * kPanelOut};
  for (int64_t o = 0; o < out; o += kPanelOut) {
    const int64_t real = std::min(kPanelOut, out - o);
    FillPanel<Product>(rows + o * (in / Product::kValues * Product::kBytes), in, real, panel);
    int64_t i = 0;
    const auto run = [&]<int kTokens>(std::integral_constant<int, kTokens>) HWY_ATTR {
      MultiplyTokens<Product::kMinimum, kTokens>(panel, groups, packed + i * chunks, chunks, real,
                                                 y + i * y_stride + o, y_stride);
      i += kTokens;
    };
    while (i + kPanelTokens <= n) run(std::integral_constant<int, kPanelTokens>());
    while (i + 2 <= n) run(std::integral_constant<int, 2>());
    if (i < n) run(std::integral_constant<int, 1>());
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_WORD_PANELS

#endif
