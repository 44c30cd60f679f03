// What:   products of one row, as its type reads it, with packed inputs.
// Math:   a product is eight chains, one for each group of 32 columns of a chunk of 256. Chain g goes
//         through the chunks: c = fma(sum, d * s, c), then, where groups have a minimum,
//         c = fma(m, t, c). sum: the exact one of the group's q * word; d, m: the group's scale and
//         minimum; s, t: the input's scale and sum (packed_input-inl.h). The product is
//         (..((c0 + c1) + c2) + ..) + c7. Panels (word_panel-inl.h) add up in this order, too, and so
//         does every SIMD target.
// Shapes: a tile (packed_input-inl.h) becomes a vector of sums with four lanes for each group.
#if defined(CARREL_KERNELS_ROW_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_ROW_SUMS_INL_H_
#undef CARREL_KERNELS_ROW_SUMS_INL_H_
#else
#define CARREL_KERNELS_ROW_SUMS_INL_H_
#endif

#include "kernels/layer/quantized_linear/block_tiles-inl.h"

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

inline constexpr int64_t kChains = kChunkGroups;
inline constexpr int64_t kTiles = kChunkGroups / kTileGroups;

using GroupSumTag = hn::RebindToSigned<GroupTag>;
using GroupSumVec = hn::Vec<GroupSumTag>;

// Of each block: lanes 0 and 2 of a added up, of b, lanes 1 and 3 of a, of b.
HWY_INLINE SumVec AddTwos(SumVec a, SumVec b) {
  const SumTag d;
  return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
}

// Of a, b and c, e so added up, lane 4 b + i: the four lanes of block b of vector i.
HWY_INLINE SumVec AddFours(SumVec ab, SumVec ce) {
  const SumTag d;
  const hn::RepartitionToWide<SumTag> dw;
  const auto x = hn::BitCast(dw, ab), y = hn::BitCast(dw, ce);
  return hn::Add(hn::BitCast(d, hn::InterleaveLower(dw, x, y)),
                 hn::BitCast(d, hn::InterleaveUpper(dw, x, y)));
}

// For each group of a chunk the lane that holds its sum.
struct alignas(64) GroupLanes {
  int32_t at[kLanes] = {};
};

template <class LaneOf>
constexpr GroupLanes LanesOfGroups(const LaneOf& lane_of) {
  GroupLanes lanes;
  for (int64_t g = 0; g < kChunkGroups; ++g) lanes.at[g] = static_cast<int32_t>(lane_of(g));
  return lanes;
}

HWY_INLINE GroupSumVec TakeGroups(SumVec sums, const GroupLanes& lanes) {
  const SumVec taken = hn::TableLookupLanes(sums, hn::SetTableIndices(SumTag(), lanes.at));
#if HWY_TARGET <= HWY_AVX3
  return hn::LowerHalf(GroupSumTag(), taken);
#else
  return taken;
#endif
}

// Of tiles with four lanes for each of their groups, these added up; groups in their order. twos:
// AddTwos of tiles 0 and 1, 2 and 3.
template <WordOrder kOrder>
HWY_INLINE GroupSumVec SumsOfGroups(const SumVec (&twos)[kTiles / 2]) {
#if HWY_TARGET <= HWY_AVX3
  static constexpr auto kLane = [](int64_t g) {
    const int64_t place = PlaceInTiles(kOrder, g);
    return place % 4 * 4 + place / 4;
  };
  static constexpr GroupLanes kFirst = LanesOfGroups(kLane);
  static constexpr GroupLanes kLast = LanesOfGroups([](int64_t g) { return kLane(g) + 2; });
  return hn::Add(TakeGroups(twos[0], kFirst), TakeGroups(twos[0], kLast));
#else
  static constexpr GroupLanes kInOrder = LanesOfGroups([](int64_t g) {
    const int64_t place = PlaceInTiles(kOrder, g);
    return place % 2 * 4 + place / 2;
  });
  return TakeGroups(AddFours(twos[0], twos[1]), kInOrder);
#endif
}

// Who takes a row's chunks, as the types read them (small_blocks-inl.h): first scales and minima of
// its groups, then its tiles. Here: their products with N inputs.
template <int N>
struct RowSums {
  const PackedChunk* x[N];
  GroupVec chains[N];
  // Of this chunk:
  GroupVec scales, minima;
  hn::Vec<hn::FixedTag<int8_t, 16>> half_scales;  // where 16 numbers have their own
  SumVec before[N];                               // the tile before this one
  SumVec sums[N][kTiles / 2];

  HWY_INLINE void Scale(GroupVec d) { scales = d; }
  HWY_INLINE void Minimum(GroupVec m) { minima = m; }
  // Numbers count from -32. Scales come in the order of HalfLane.
  HWY_INLINE void ScaleHalves(const int8_t* bytes) {
    const hn::FixedTag<int8_t, 16> d;
    alignas(16) static constexpr int8_t kOrder[16] = {0, 1, 4,  5,  2,  3,  6,  7,
                                                      8, 9, 12, 13, 10, 11, 14, 15};
    half_scales = hn::TableLookupBytes(hn::LoadU(d, bytes), hn::Load(d, kOrder));
  }

  CARREL_VNNI_ATTR HWY_INLINE void Tile(const WordVec (&q)[4], int64_t tile) {
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      const int16_t* words = WordsOf(tile, h);
      SumVec sum = hn::Zero(SumTag());
      CARREL_UNROLL
      for (int i = 0; i < 4; ++i) sum = AddPairs(sum, q[i], LoadWords(words + i * kVectorWords));
      if (tile % 2 == 0) {
        before[h] = Now(sum);
      } else {
        sums[h][tile / 2] = Now(AddTwos(before[h], sum));
      }
    }
  }

  // A tile of WordOrder::kPairs; its first 16 columns and its last have their own scales.
  CARREL_VNNI_ATTR HWY_INLINE void TileOfHalves(const WordVec (&q)[4], int64_t tile) {
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      const int16_t* words = WordsOf(tile, h);
      const auto half = [&](int i) HWY_ATTR {
        const SumVec even = AddPairs(hn::Zero(SumTag()), q[i], LoadWords(words + i * kVectorWords));
        return AddPairs(even, q[i + 1], LoadWords(words + (i + 1) * kVectorWords));
      };
      const SumVec twos = AddTwos(half(0), half(2));
      if (tile % 2 == 0) {
        before[h] = Now(twos);
      } else {
        const int64_t pair = tile / 2;
        sums[h][pair] = ScaledHalves(AddFours(before[h], twos), x[h]->half_sums, pair);
      }
    }
  }

  HWY_INLINE void NoTile(int64_t tile) {
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) sums[h][tile / 2] = AddTwos(before[h], hn::Zero(SumTag()));
  }

  // A chunk of which not all tiles come.
  HWY_INLINE void ClearSums() {
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      CARREL_UNROLL
      for (int64_t i = 0; i < kTiles / 2; ++i) sums[h][i] = hn::Zero(SumTag());
    }
  }

  // After the chunk's tiles.
  template <class Product>
  HWY_INLINE void AddChunk() {
    const GroupTag d;
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      GroupSumVec exact;
      if constexpr (Product::kFolded) {
        exact = SumsOfHalves(sums[h]);
      } else {
        exact = SumsOfGroups<Product::kOrder>(sums[h]);
      }
      const GroupVec both = hn::Mul(scales, hn::LoadU(d, x[h]->scales));
      chains[h] = hn::MulAdd(hn::ConvertTo(d, exact), both, chains[h]);
      if constexpr (Product::kMinimum) {
        chains[h] = hn::MulAdd(minima, hn::LoadU(d, x[h]->sums), chains[h]);
      }
      ++x[h];
    }
  }

 private:
  HWY_INLINE const int16_t* WordsOf(int64_t tile, int h) const {
    return x[h]->words + tile * 4 * kVectorWords;
  }

  // Before what follows: or the compiler adds up all tiles at once, for which there are no registers.
  static HWY_INLINE SumVec Now(SumVec sum) {
    asm("" : "+v"(sum.raw));
    return sum;
  }

  // Of a pair of tiles, by HalfLane.
  HWY_INLINE SumVec ScaledHalves(SumVec fours, const int32_t* half_sums,
                                 [[maybe_unused]] int64_t pair) const {
    const SumTag d;
#if HWY_TARGET <= HWY_AVX3
    const SumVec scale = hn::PromoteTo(d, half_scales);
#else
    const hn::FixedTag<int8_t, 8> d8;
    const SumVec scale = hn::PromoteTo(
        d, pair == 0 ? hn::LowerHalf(d8, half_scales) : hn::UpperHalf(d8, half_scales));
#endif
    return hn::Mul(hn::Sub(fours, hn::LoadU(d, half_sums + pair * kLanes)), scale);
  }

  static HWY_INLINE GroupSumVec SumsOfHalves(const SumVec (&pairs)[kTiles / 2]) {
    const auto both = [](SumVec v) HWY_ATTR { return hn::Add(v, hn::Shuffle2301(v)); };
#if HWY_TARGET <= HWY_AVX3
    static constexpr GroupLanes kInOrder = LanesOfGroups([](int64_t g) { return HalfLane(g, 0); });
    return TakeGroups(both(pairs[0]), kInOrder);
#else
    // Lanes of a block: groups of tiles 0, 2, 1, 3.
    static constexpr GroupLanes kInOrder =
        LanesOfGroups([](int64_t g) { return g % 2 * 4 + g / 4 + g / 2 % 2 * 2; });
    return TakeGroups(hn::OddEven(both(pairs[1]), both(pairs[0])), kInOrder);
#endif
  }
};

// The chains of four rows added up.
HWY_INLINE void AddChains(GroupVec a, GroupVec b, GroupVec c, GroupVec e, float* four) {
  const GroupTag d;
  const hn::RepartitionToWide<GroupTag> dw;
  const hn::Half<GroupTag> dh;
  const auto ab_low = hn::BitCast(dw, hn::InterleaveLower(d, a, b));
  const auto ab_high = hn::BitCast(dw, hn::InterleaveUpper(d, a, b));
  const auto ce_low = hn::BitCast(dw, hn::InterleaveLower(d, c, e));
  const auto ce_high = hn::BitCast(dw, hn::InterleaveUpper(d, c, e));
  // Chains 0 and 4 of all rows, 1 and 5, 2 and 6, 3 and 7.
  const GroupVec of[4] = {hn::BitCast(d, hn::InterleaveLower(dw, ab_low, ce_low)),
                          hn::BitCast(d, hn::InterleaveUpper(dw, ab_low, ce_low)),
                          hn::BitCast(d, hn::InterleaveLower(dw, ab_high, ce_high)),
                          hn::BitCast(d, hn::InterleaveUpper(dw, ab_high, ce_high))};
  auto sum = hn::LowerHalf(dh, of[0]);
  CARREL_UNROLL
  for (int i = 1; i < 4; ++i) sum = hn::Add(sum, hn::LowerHalf(dh, of[i]));
  CARREL_UNROLL
  for (int i = 0; i < 4; ++i) sum = hn::Add(sum, hn::UpperHalf(dh, of[i]));
  hn::StoreU(sum, dh, four);
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
