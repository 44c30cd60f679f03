// What:   panels of bytes for AMX's tiles (byte_panel_amx.h): filled as panels of words are, two
//         vectors of words laid into one another.
// Shapes: byte_panel_amx.h.
// Cost:   half of a panel of words: what is written and read.
#if defined(CARREL_KERNELS_BYTE_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_BYTE_PANEL_INL_H_
#undef CARREL_KERNELS_BYTE_PANEL_INL_H_
#else
#define CARREL_KERNELS_BYTE_PANEL_INL_H_
#endif

#include "kernels/layer/quantized_linear/byte_panel_amx.h"
#include "kernels/layer/quantized_linear/word_panel-inl.h"

// Who has AMX has these.
#undef CARREL_BYTE_PANELS
#define CARREL_BYTE_PANELS (CARREL_BLOCK_PRODUCTS && HWY_TARGET <= HWY_AVX3_DL)

#if CARREL_BYTE_PANELS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// Where a vector of rows puts a group, as GroupPlace.
struct BytePlace {
  int8_t* bytes;
  float* scales;
  float* minima;

  // An even pair's words leave room for those of the odd one behind it, which comes later.
  HWY_INLINE void Put(int64_t quarter, int64_t pair, BitsVec words) const {
    const BitsTag d;
    auto* const at = reinterpret_cast<uint16_t*>(bytes + (quarter * 2 + pair / 2) * 64);
    hn::StoreU(pair % 2 == 0 ? hn::And(words, hn::Set(d, uint16_t{255}))
                             : hn::Or(hn::LoadU(d, at), hn::ShiftLeft<8>(words)),
               d, at);
  }
  HWY_INLINE void Put(int64_t quarter, int64_t pair, WordVec words) const {
    Put(quarter, pair, hn::BitCast(BitsTag(), words));
  }
  HWY_INLINE void Scale(FloatVec d) const { hn::StoreU(d, FloatTag(), scales); }
  HWY_INLINE void Minimum(FloatVec m) const { hn::StoreU(m, FloatTag(), minima); }
};

struct BytePanelOfRows : BytePanel {
  HWY_INLINE BytePlace Place(int64_t at, int64_t first) const {
    at *= kPanelOut;
    return {bytes + (at + first) * 32, scales + at + first, minima + at + first};
  }
};

// y [n, out] of n tokens packed as bytes; room: as much as panels of words need.
template <class Product>
void MultiplyByBytePanels(const uint8_t* rows, int64_t in, int64_t out, int64_t n,
                          const PackedChunk* packed, float* y, int64_t y_stride, float* room) {
  const int64_t groups = in / 32, chunks = PackedChunks(in);
  float* const scales = room + groups * kPanelOut * 32 / static_cast<int64_t>(sizeof(float));
  const BytePanelOfRows panel = {
      {reinterpret_cast<int8_t*>(room), scales, scales + groups * kPanelOut, groups}};
  ForEachPanel<Product>(
      rows, in, out, n, kByteTokens, panel, 2 * groups,
      [&](int64_t begin, int64_t count, int64_t o, int64_t real, LinesAhead& next) HWY_ATTR {
        MultiplyBytePanel(panel, Product::kMinimum, packed + begin * chunks, count, chunks, real,
                          y + begin * y_stride + o, y_stride, next);
      });
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BYTE_PANELS

#endif
