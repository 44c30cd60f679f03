#include "kernels/layer/linear/split_gemm.h"

#include "common/status.h"

#if defined(__x86_64__)

#include "kernels/amx_tiles-inl.h"

namespace carrel::kernels {
namespace {

using amx::CeilDivide;
using amx::kTileColumns;
using amx::kTileElements;
using amx::kTileRows;

// Rows of W packed at a time: where `in` is large and packed tokens come from beyond the L2 cache,
// they come once for all of these.
constexpr int64_t kPanelRows = 128;
// Tiles of 32 columns that sums stay in registers for; a panel of so many stays in the L2 cache.
constexpr int64_t kSteps = 64;
constexpr int64_t kAlignFloats = 16;

int64_t Steps(int64_t in) { return CeilDivide(in, kTileColumns); }

int64_t PackedFloats(int64_t rows, int64_t in, int64_t parts) {
  return CeilDivide(rows, 2 * kTileRows) * 2 * kTileRows * Steps(in) * kTileColumns * parts / 2;
}

// A run of tiles for every 16 rows.
template <int kParts>
struct Packed {
  uint16_t* tiles;
  int64_t steps;
  uint16_t* Run(int64_t row) const {
    return tiles + row / kTileRows * steps * kParts * kTileElements;
  }
};

// Tokens and weights: two parts each, or three and one.
struct TwoByTwo {
  static constexpr int kTokenParts = 2, kWeightParts = 2;
  static CARREL_AMX_INLINE void Add(const uint16_t* top, const uint16_t* bottom,
                                    const uint16_t* left, const uint16_t* right, int64_t steps) {
    amx::AddProducts(top, bottom, left, right, steps);
  }
};
struct ThreeByOne {
  static constexpr int kTokenParts = 3, kWeightParts = 1;
  static CARREL_AMX_INLINE void Add(const uint16_t* top, const uint16_t* bottom,
                                    const uint16_t* left, const uint16_t* right, int64_t steps) {
    amx::AddProducts3By1(top, bottom, left, right, steps);
  }
};

// Where 32 x 32 sums lie while y has not room for all of them.
struct alignas(64) SumBlock {
  float sums[2 * kTileRows][2 * kTileRows];
};

CARREL_AMX_INLINE void LoadSums(const float* sums, int64_t stride) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
  _tile_loadd(0, sums, bytes);
  _tile_loadd(1, sums + 16, bytes);
  _tile_loadd(2, sums + kTileRows * stride, bytes);
  _tile_loadd(3, sums + kTileRows * stride + 16, bytes);
}

CARREL_AMX_INLINE void StoreSums(float* sums, int64_t stride) {
  const int64_t bytes = stride * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + 16, bytes);
  _tile_stored(2, sums + kTileRows * stride, bytes);
  _tile_stored(3, sums + kTileRows * stride + 16, bytes);
}

CARREL_AMX_INLINE void ZeroSums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

template <class Parts>
struct Operands {
  Packed<Parts::kTokenParts> x;
  Packed<Parts::kWeightParts> w;
};

// Steps [step, step + steps) of 32 tokens with 32 rows of W; sums of the first steps begin at zero,
// others go on. rows, columns: how much of the 32 x 32 y has.
template <class Parts>
CARREL_AMX void MultiplyBlock(const Operands<Parts>& p, int64_t token, int64_t row, int64_t step,
                              int64_t steps, int64_t rows, int64_t columns, float* y,
                              int64_t y_stride) {
  const bool whole = rows == 2 * kTileRows && columns == 2 * kTileRows;
  SumBlock block;
  float* const sums = whole ? y : &block.sums[0][0];
  const int64_t stride = whole ? y_stride : 2 * kTileRows;
  if (step == 0) {
    ZeroSums();
  } else {
    for (int64_t i = 0; !whole && i < rows; ++i) {
      std::copy_n(y + i * y_stride, columns, block.sums[i]);
    }
    amx::Written();
    LoadSums(sums, stride);
  }
  const int64_t x_at = Parts::kTokenParts * step * kTileElements;
  const int64_t w_at = Parts::kWeightParts * step * kTileElements;
  Parts::Add(p.x.Run(token) + x_at, p.x.Run(token + kTileRows) + x_at, p.w.Run(row) + w_at,
             p.w.Run(row + kTileRows) + w_at, steps);
  StoreSums(sums, stride);
  for (int64_t i = 0; !whole && i < rows; ++i) {
    std::copy_n(block.sums[i], columns, y + i * y_stride);
  }
}

// A panel of W with all packed tokens.
template <class Parts>
CARREL_AMX void MultiplyPacked(const Operands<Parts>& p, int64_t n, int64_t rows, float* y,
                               int64_t y_stride) {
  for (int64_t step = 0; step < p.x.steps; step += kSteps) {
    const int64_t steps = std::min(kSteps, p.x.steps - step);
    for (int64_t token = 0; token < n; token += 2 * kTileRows) {
      for (int64_t row = 0; row < rows; row += 2 * kTileRows) {
        MultiplyBlock(p, token, row, step, steps, std::min(2 * kTileRows, n - token),
                      std::min(2 * kTileRows, rows - row), y + token * y_stride + row, y_stride);
      }
    }
  }
}

template <int kParts>
CARREL_AMX void PackTokens(const float* x, int64_t n, int64_t x_stride, int64_t in,
                           const Packed<kParts>& to) {
  for (int64_t i = 0; i < CeilDivide(n, 2 * kTileRows) * 2 * kTileRows; i += kTileRows) {
    amx::PackRows<kParts>(x + std::min(i, n) * x_stride, n - i, x_stride, in, 1.0f, to.Run(i));
  }
}

template <int kParts>
CARREL_AMX void PackWeights(const float* w, int64_t rows, int64_t in, uint16_t* run) {
  amx::PackPairs<kParts>(w, rows, in, in, 1.0f, run);
}

using WidenRows = absl::FunctionRef<void(int64_t begin, int64_t end, float* rows)>;

// scratch is aligned.
template <class Parts>
CARREL_AMX void Multiply(const float* x, int64_t n, int64_t x_stride, int64_t out, int64_t in,
                         WidenRows widen, float* y, int64_t y_stride, float* scratch) {
  float* const weights = scratch + PackedFloats(kSplitTokens, in, Parts::kTokenParts);
  float* const widened = weights + PackedFloats(kPanelRows, in, Parts::kWeightParts);
  const Operands<Parts> operands{{reinterpret_cast<uint16_t*>(scratch), Steps(in)},
                                 {reinterpret_cast<uint16_t*>(weights), Steps(in)}};
  const amx::TileScope tiles;
  for (int64_t i = 0; i < n; i += kSplitTokens) {
    const int64_t count = std::min(kSplitTokens, n - i);
    PackTokens(x + i * x_stride, count, x_stride, in, operands.x);
    for (int64_t o = 0; o < out; o += kPanelRows) {
      const int64_t rows = std::min(kPanelRows, out - o);
      for (int64_t r = 0; r < CeilDivide(rows, 2 * kTileRows) * 2 * kTileRows; r += kTileRows) {
        const int64_t here = std::clamp<int64_t>(rows - r, 0, kTileRows);
        if (here > 0) widen(o + r, o + r + here, widened);
        PackWeights<Parts::kWeightParts>(widened, here, in, operands.w.Run(r));
      }
      amx::Written();
      MultiplyPacked(operands, count, rows, y + i * y_stride + o, y_stride);
    }
  }
}

}  // namespace

int64_t SplitGemmScratchFloats(int64_t in) {
  return kAlignFloats + PackedFloats(kSplitTokens, in, 3) + PackedFloats(kPanelRows, in, 2) +
         kSplitWidenRows * in;
}

void SplitGemm(const float* x, int64_t n, int64_t x_stride, int64_t out, int64_t in, bool bf16,
               WidenRows widen, float* y, int64_t y_stride, float* scratch) {
  static_assert(kSplitWidenRows == kTileRows);
  const auto misaligned =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(scratch) / sizeof(float) % kAlignFloats);
  if (misaligned != 0) scratch += kAlignFloats - misaligned;
  const auto multiply = bf16 ? Multiply<ThreeByOne> : Multiply<TwoByTwo>;
  multiply(x, n, x_stride, out, in, widen, y, y_stride, scratch);
}

}  // namespace carrel::kernels

#else

namespace carrel::kernels {

int64_t SplitGemmScratchFloats(int64_t) { return 0; }

void SplitGemm(const float*, int64_t, int64_t, int64_t, int64_t, bool,
               absl::FunctionRef<void(int64_t, int64_t, float*)>, float*, int64_t, float*) {
  CARREL_CHECK(false);  // AmxUsed() is false here
}

}  // namespace carrel::kernels
#endif
