// What:   rows of blocks times packed inputs, up to kInputs of them to a pass over the rows.
// Threads: the value of one row with one input does not depend on how many others are computed.
#if defined(CARREL_KERNELS_MULTIPLY_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_MULTIPLY_BLOCKS_INL_H_
#undef CARREL_KERNELS_MULTIPLY_BLOCKS_INL_H_
#else
#define CARREL_KERNELS_MULTIPLY_BLOCKS_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include "kernels/layer/quantized_linear/large_blocks-inl.h"
#include "kernels/layer/quantized_linear/row_sums-inl.h"
#include "kernels/layer/quantized_linear/small_blocks-inl.h"
#include "kernels/read_ahead.h"

#if CARREL_BLOCK_PRODUCTS

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// One row with N inputs, `stride` chunks apart.
template <class Product, int N>
CARREL_VNNI_ATTR HWY_INLINE void MultiplyRow(const uint8_t* row, int64_t in, const PackedChunk* x,
                                             int64_t stride, int64_t ahead, GroupVec (&chains)[N]) {
  constexpr int64_t kBytes = kChunkValues / Product::kValues * Product::kBytes;
  RowSums<N> sums;
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) {
    sums.chains[h] = hn::Zero(GroupTag());
    sums.x[h] = x + h * stride;
  }
  const int64_t chunks = in / kChunkValues;
  for (int64_t i = 0; i < chunks; ++i, row += kBytes) {
    CARREL_UNROLL
    for (int64_t b = 0; b < kBytes; b += 64) AskFor(row + b, ahead);
    Product::ReadChunk(BlocksOf<Product::kBytes, kChunkGroups>{row, kChunkGroups}, sums);
    sums.template AddChunk<Product>();
  }
  const int64_t left = in % kChunkValues / 32;
  if (Product::kValues < kChunkValues && left > 0) {
    sums.ClearSums();
    if (left == 2) {  // widths of many small models
      Product::ReadChunk(BlocksOf<Product::kBytes, 2>{row, left}, sums);
    } else if (left == 4) {
      Product::ReadChunk(BlocksOf<Product::kBytes, 4>{row, left}, sums);
    } else {
      Product::ReadChunk(BlocksOf<Product::kBytes, kSomeBlocks>{row, left}, sums);
    }
    sums.template AddChunk<Product>();
  }
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) chains[h] = sums.chains[h];
}

// y[h, o] of N inputs with rows [0, count).
template <class Product, int N>
CARREL_VNNI_ATTR HWY_NOINLINE void MultiplyRows(const uint8_t* rows, int64_t in, int64_t count,
                                                const PackedChunk* x, int64_t stride, float* y,
                                                int64_t y_stride) {
  const int64_t row_bytes = in / Product::kValues * Product::kBytes;
  const int64_t ahead =
      BytesAhead(N * PackedChunks(in) * static_cast<int64_t>(sizeof(PackedChunk)), 6144);
  for (int64_t o = 0; o < count; o += 4) {
    const int64_t real = std::min<int64_t>(4, count - o);
    GroupVec chains[4][N];
    for (int64_t r = 0; r < 4; ++r) {
      // A last group of fewer than four repeats its last row.
      const uint8_t* row = rows + (o + std::min(r, real - 1)) * row_bytes;
      MultiplyRow<Product, N>(row, in, x, stride, ahead, chains[r]);
    }
    for (int h = 0; h < N; ++h) {
      float four[4];
      AddChains(chains[0][h], chains[1][h], chains[2][h], chains[3][h], four);
      for (int64_t r = 0; r < real; ++r) y[h * y_stride + o + r] = four[r];
    }
  }
}

// Inputs that meet a row at a time: what they need must fit 32 or 16 registers.
inline constexpr int kInputs = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

// run(count), which the compiler knows; from 1 to kMost.
template <int kMost, class Run>
HWY_INLINE void WithCount(int64_t count, const Run& run) {
  if constexpr (kMost > 1) {
    if (count < kMost) return WithCount<kMost - 1>(count, run);
  }
  run(std::integral_constant<int, kMost>());
}

template <class Product>
HWY_INLINE void MultiplyInputs(const uint8_t* rows, int64_t in, int64_t count, int64_t n,
                               const PackedChunk* packed, float* y, int64_t y_stride) {
  const int64_t stride = PackedChunks(in);
  for (int64_t i = 0; i < n; i += kInputs) {
    WithCount<kInputs>(n - i, [&]<int N>(std::integral_constant<int, N>) HWY_ATTR {
      MultiplyRows<Product, N>(rows, in, count, packed + i * stride, stride, y + i * y_stride,
                               y_stride);
    });
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // CARREL_BLOCK_PRODUCTS

#endif
