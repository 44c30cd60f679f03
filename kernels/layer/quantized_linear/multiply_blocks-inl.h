// What:   rows of blocks times packed inputs, up to kInputs of them to a pass over the rows.
// Threads: the value of one row with one input does not depend on how many others are computed.
#if defined(CARREL_KERNELS_MULTIPLY_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_MULTIPLY_BLOCKS_INL_H_
#undef CARREL_KERNELS_MULTIPLY_BLOCKS_INL_H_
#else
#define CARREL_KERNELS_MULTIPLY_BLOCKS_INL_H_
#endif

#include <algorithm>

#include "kernels/layer/quantized_linear/large_blocks-inl.h"
#include "kernels/layer/quantized_linear/small_blocks-inl.h"
#include "kernels/read_ahead.h"

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// One row with N inputs, `stride` chunks apart.
template <class Product, int N>
CARREL_VNNI_ATTR HWY_INLINE void MultiplyRow(const uint8_t* row, int64_t in, const PackedChunk* x,
                                             int64_t stride, int64_t ahead, FloatVec (&out)[N]) {
  const FloatTag d;
  RowSums<N> sums;
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) {
    sums.products[h] = hn::Zero(d);
    sums.minima[h] = hn::Zero(GroupTag());
    sums.x[h] = x + h * stride;
  }
  constexpr int64_t kBytes = kChunkValues / Product::kValues * Product::kBytes;
  const int64_t chunks = in / kChunkValues;
  for (int64_t i = 0; i < chunks; ++i) {
    CARREL_UNROLL
    for (int64_t b = 0; b < kBytes; b += 64) AskFor(row + b, ahead);
    Product::ReadChunk(Blocks<kChunkGroups>{row, Product::kBytes, kChunkGroups}, sums);
    row += kBytes;
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) ++sums.x[h];
  }
  if constexpr (Product::kValues < kChunkValues) {
    const int64_t left = in % kChunkValues / Product::kValues;
    if (left == 2) {  // widths of many small models
      Product::ReadChunk(Blocks<2>{row, Product::kBytes, left}, sums);
    } else if (left == 4) {
      Product::ReadChunk(Blocks<4>{row, Product::kBytes, left}, sums);
    } else if (left > 0) {
      Product::ReadChunk(Blocks<kSomeBlocks>{row, Product::kBytes, left}, sums);
    }
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
  const int64_t ahead =
      BytesAhead(N * PackedChunks(in) * static_cast<int64_t>(sizeof(PackedChunk)), 2048);
  for (int64_t j = 0; j < count; j += 4) {
    const int64_t real = std::min<int64_t>(4, count - j);
    FloatVec sums[4][N];
    for (int64_t r = 0; r < 4; ++r) {
      // A last group of fewer than four repeats its last row.
      const uint8_t* row = rows + (j + std::min(r, real - 1)) * row_bytes;
      MultiplyRow<Product, N>(row, in, x, stride, ahead, sums[r]);
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
