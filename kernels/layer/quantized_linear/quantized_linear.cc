#include "kernels/layer/quantized_linear/quantized_linear.h"

#include <algorithm>
#include <cstring>

#include "kernels/amx.h"
#include "kernels/layer/linear/linear.h"
#include "kernels/layer/linear/split_gemm.h"
#include "kernels/layer/quantized_linear/byte_panel_amx.h"
#include "kernels/layer/quantized_linear/packed_chunk.h"

// Highway leaves this target out unless it is asked for.
#define HWY_WANT_AVX3_DL 1

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layer/quantized_linear/quantized_linear.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/layer/quantized_linear/byte_panel-inl.h"
#include "kernels/layer/quantized_linear/multiply_blocks-inl.h"
#include "kernels/layer/quantized_linear/widen_blocks-inl.h"
#include "kernels/layer/quantized_linear/word_panel-inl.h"
#include "kernels/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

void WidenImpl(GgufType type, const void* blocks, int64_t count, float* out) {
#if CARREL_BLOCK_PRODUCTS
  WidenBlocks(type, static_cast<const uint8_t*>(blocks), count, out);
#else
  Dequantize(type, blocks, count, out);
#endif
}

// Four rows at a time are widened and multiplied as rows of floats.
void WidenedProducts(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                     float* y, int64_t y_stride, float* scratch) {
  const ContiguousRows<F32Element> rows{scratch, w.in};
  for (int64_t o = 0; o < w.out; o += 4) {
    const int64_t count = std::min<int64_t>(4, w.out - o);
    WidenImpl(w.type, w.Rows(o, o + count).data, count * w.in, scratch);
    ScoreRows(rows, count, w.in, x, n, x_stride, 1.0f, y + o, y_stride);
  }
}

// Whether blocks are multiplied as they lie.
bool BlocksImpl() { return CARREL_BLOCK_PRODUCTS; }

// Whether panels are of bytes. Those of Q6_K have words that no byte holds.
[[maybe_unused]] bool InBytes(GgufType type) {
#if CARREL_BYTE_PANELS
  return type != GgufType::kQ6_K && BytesTakeTiles();
#else
  (void)type;
  return false;
#endif
}

// For panels, or for tokens that meet rows as they lie.
void PackImpl([[maybe_unused]] GgufType type, [[maybe_unused]] bool panels,
              [[maybe_unused]] const float* x, [[maybe_unused]] int64_t n,
              [[maybe_unused]] int64_t x_stride, [[maybe_unused]] int64_t in,
              [[maybe_unused]] PackedChunk* packed) {
#if CARREL_BLOCK_PRODUCTS
  const float top = type == GgufType::kQ6_K ? kFoldedTop : kTop;
  for (int64_t i = 0; i < n; ++i, x += x_stride, packed += PackedChunks(in)) {
    if (panels && InBytes(type)) {
      PackPanelInput<true>(x, in, top, packed);
    } else if (panels) {
      PackPanelInput<false>(x, in, top, packed);
    } else if (type == GgufType::kQ4_K || type == GgufType::kQ5_K) {
      PackInput<WordOrder::kEvenOdd>(x, in, top, packed);
    } else if (type == GgufType::kQ6_K) {
      PackInput<WordOrder::kPairs>(x, in, top, packed);
    } else {
      PackInput<WordOrder::kQuarters>(x, in, top, packed);
    }
  }
#endif
}

#if CARREL_BLOCK_PRODUCTS
// run(Product()) of a type that HasBlockProducts.
template <class Run>
HWY_INLINE void WithProduct(GgufType type, const Run& run) {
  switch (type) {
    case GgufType::kQ4_0:
      return run(Q4_0Product());
    case GgufType::kQ4_1:
      return run(Q4_1Product());
    case GgufType::kQ5_0:
      return run(Q5_0Product());
    case GgufType::kQ5_1:
      return run(Q5_1Product());
    case GgufType::kQ8_0:
      return run(Q8_0Product());
    case GgufType::kQ4_K:
      return run(Q4KProduct());
    case GgufType::kQ5_K:
      return run(Q5KProduct());
    case GgufType::kQ6_K:
      return run(Q6KProduct());
    case GgufType::kIQ4_NL:
      return run(Iq4NlProduct());
    case GgufType::kIQ4_XS:
      return run(Iq4XsProduct());
    default:
      return run(Mxfp4Product());
  }
}
#endif

// Tokens so packed, of a type that HasBlockProducts.
void BlockProductsImpl([[maybe_unused]] const PackedChunk* packed, [[maybe_unused]] bool panels,
                       [[maybe_unused]] int64_t n, [[maybe_unused]] const QuantizedMatrix& w,
                       [[maybe_unused]] float* y, [[maybe_unused]] int64_t y_stride,
                       [[maybe_unused]] float* room) {
#if CARREL_BLOCK_PRODUCTS
  WithProduct(w.type, [&]<class Product>(Product) HWY_ATTR {
    const auto* rows = static_cast<const uint8_t*>(w.data);
#if CARREL_BYTE_PANELS
    if constexpr (!Product::kFolded) {
      if (panels && InBytes(w.type)) {
        return MultiplyByBytePanels<Product>(rows, w.in, w.out, n, packed, y, y_stride, room);
      }
    }
#endif
    if (panels) {
      MultiplyByPanels<Product>(rows, w.in, w.out, n, packed, y, y_stride, room);
    } else {
      MultiplyInputs<Product>(rows, w.in, w.out, n, packed, y, y_stride);
    }
  });
#endif
}

// n < kQuantizedGemmTokens, of any type.
void PlainProductsImpl(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                       float* y, int64_t y_stride, float* scratch) {
#if CARREL_BLOCK_PRODUCTS
  const auto run_plain = [&]<class E>(E) HWY_ATTR {
    ScoreRows(ContiguousRows<E>{static_cast<const uint8_t*>(w.data), w.in}, w.out, w.in, x, n,
              x_stride, 1.0f, y, y_stride);
  };
  if (w.type == GgufType::kF32) return run_plain(F32Element());
  if (w.type == GgufType::kF16) return run_plain(F16Element());
  if (w.type == GgufType::kBf16) return run_plain(Bf16Element());
#endif
  WidenedProducts(x, n, x_stride, w, y, y_stride, scratch);
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(WidenImpl);
HWY_EXPORT(PackImpl);
HWY_EXPORT(BlocksImpl);
HWY_EXPORT(BlockProductsImpl);
HWY_EXPORT(PlainProductsImpl);

namespace {

// Output rows widened at a time: one panel stays in the L2 cache for `in` up to 1024.
constexpr int64_t kPanelRows = 128;

// Rows of f32 and f16 keep products of f32; decision 046 has what parts cost the others.
bool InParts(const QuantizedMatrix& w) {
  return (w.type == GgufType::kBf16 || TraitsOf(w.type).quantized) && AmxUsed();
}

// Whether its blocks are multiplied as they lie, or by panels of their words.
bool InBlocks(const QuantizedMatrix& w) {
  return HasBlockProducts(w.type) && HWY_DYNAMIC_DISPATCH(BlocksImpl)();
}

// Tokens that a call packs at a time if its caller did not.
constexpr int64_t kPackTokens = 2 * kLinearTokenTile;
constexpr int64_t kChunkFloats = sizeof(PackedChunk) / sizeof(float);

// A panel's words, scales and minima, from a cache line on: 32 rows at most.
int64_t PanelFloats(const QuantizedMatrix& w) { return 16 + (16 + 2) * w.in; }

float* FromCacheLine(float* at) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(at) / sizeof(float) % 16;
  return past == 0 ? at : at + 16 - past;
}

// Of n tokens those of whole tiles, and of a last one if it has `least`: they go together, the others
// as in a call with just these.
int64_t Together(int64_t n, int64_t least) {
  const int64_t last = n % kLinearTokenTile;
  return last < least ? n - last : n;
}

// Those whose sums have another order than a token's alone. Fewer than a tile are faster by panels than
// in parts.
int64_t GemmTokens(const QuantizedMatrix& w, int64_t n) {
  if (!InBlocks(w)) return Together(n, kQuantizedGemmTokens);
  return InParts(w) ? Together(n, kLinearTokenTile) : 0;
}

int64_t PackedFloats(const QuantizedMatrix& w, int64_t n) {
  return n * PackedChunks(w.in) * kChunkFloats;
}

// part(panels, begin, count): tokens that go by panels, and the last ones, which do not.
template <class Part>
void ForBlockParts(int64_t n, const Part& part) {
  const int64_t panels = Together(n, kQuantizedPanelTokens);
  if (panels > 0) part(true, 0, panels);
  if (panels < n) part(false, panels, n - panels);
}

void PackForBlocks(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                   float* packed) {
  ForBlockParts(n, [&](bool panels, int64_t begin, int64_t count) {
    HWY_DYNAMIC_DISPATCH(PackImpl)
    (w.type, panels, x + begin * x_stride, count, x_stride, w.in,
     reinterpret_cast<PackedChunk*>(packed + PackedFloats(w, begin)));
  });
}

// room: PanelFloats(w).
void MultiplyBlocks(const float* packed, int64_t n, const QuantizedMatrix& w, float* y,
                    int64_t y_stride, float* room) {
  ForBlockParts(n, [&](bool panels, int64_t begin, int64_t count) {
    const float* first = packed + PackedFloats(w, begin);
    HWY_DYNAMIC_DISPATCH(BlockProductsImpl)
    (reinterpret_cast<const PackedChunk*>(first), panels, count, w, y + begin * y_stride, y_stride,
     FromCacheLine(room));
  });
}

void PackAndMultiplyBlocks(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                           float* y, int64_t y_stride, float* scratch) {
  float* const own = scratch + PanelFloats(w);
  for (int64_t i = 0; i < n; i += kPackTokens) {
    const int64_t count = std::min(kPackTokens, n - i);
    PackForBlocks(x + i * x_stride, count, x_stride, w, own);
    MultiplyBlocks(own, count, w, y + i * y_stride, y_stride, scratch);
  }
}

// In parts of bf16 or, as Linear does, by OpenBLAS.
void Gemm(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w, float* y,
          int64_t y_stride, float* scratch) {
  if (InParts(w)) {
    const auto widen = [&](int64_t begin, int64_t end, float* rows) {
      Widen(w.type, w.Rows(begin, end).data, (end - begin) * w.in, rows);
    };
    return SplitGemm(x, n, x_stride, w.out, w.in, w.type == GgufType::kBf16, widen, y, y_stride,
                     scratch);
  }
  for (int64_t o = 0; o < w.out; o += kPanelRows) {
    const QuantizedMatrix part = w.Rows(o, std::min(w.out, o + kPanelRows));
    Widen(part.type, part.data, part.out * part.in, scratch);
    MultiplyPanel(x, n, x_stride, scratch, part.out, part.in, false, y + o, y_stride);
  }
}

void AddBias(const QuantizedMatrix& w, int64_t n, float* y, int64_t y_stride) {
  if (w.bias == nullptr) return;
  for (int64_t o = 0; o < w.out; ++o) {
    float bias;
    std::memcpy(&bias, static_cast<const uint8_t*>(w.bias) + o * sizeof(float), sizeof(bias));
    for (int64_t i = 0; i < n; ++i) y[i * y_stride + o] += bias;
  }
}

}  // namespace

QuantizedMatrix QuantizedMatrix::Rows(int64_t begin, int64_t end) const {
  QuantizedMatrix part = *this;
  part.data = static_cast<const uint8_t*>(data) + begin * GgufBytes(type, in);
  part.out = end - begin;
  if (bias != nullptr) part.bias = static_cast<const uint8_t*>(bias) + begin * sizeof(float);
  return part;
}

bool HasBlockProducts(GgufType type) {
  return TraitsOf(type).quantized && type != GgufType::kQ2_K && type != GgufType::kQ3_K;
}

int64_t QuantizedTokensAlike(const QuantizedMatrix& w) {
  if (!InBlocks(w)) return kQuantizedGemmTokens - 1;
  return InParts(w) ? kLinearTokenTile - 1 : kAnyTokens;
}

int64_t PackedTokensFloats(const QuantizedMatrix& w, int64_t n) {
  if (!InBlocks(w) || GemmTokens(w, n) > 0) return 0;
  return PackedFloats(w, n);
}

void PackTokens(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                float* packed) {
  if (PackedTokensFloats(w, n) > 0) PackForBlocks(x, n, x_stride, w, packed);
}

int64_t QuantizedLinearScratchFloats(const QuantizedMatrix& w) {
  const int64_t parts = InParts(w) ? SplitGemmScratchFloats(w.in) : 0;
  if (!InBlocks(w)) return std::max(parts, kPanelRows * w.in);
  return std::max(parts, PanelFloats(w) + PackedFloats(w, kPackTokens));
}

void Widen(GgufType type, const void* blocks, int64_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(WidenImpl)(type, blocks, count, out);
}

void QuantizedLinear(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                     float* y, int64_t y_stride, float* scratch, const float* packed) {
  const int64_t gemm = GemmTokens(w, n);
  if (gemm > 0) Gemm(x, gemm, x_stride, w, y, y_stride, scratch);
  const float* rest = x + gemm * x_stride;
  float* rest_y = y + gemm * y_stride;
  if (gemm == n) {
    // Nothing is left.
  } else if (!InBlocks(w)) {
    HWY_DYNAMIC_DISPATCH(PlainProductsImpl)
    (rest, n - gemm, x_stride, w, rest_y, y_stride, scratch);
  } else if (packed != nullptr) {
    MultiplyBlocks(packed, n, w, y, y_stride, scratch);
  } else {
    PackAndMultiplyBlocks(rest, n - gemm, x_stride, w, rest_y, y_stride, scratch);
  }
  AddBias(w, n, y, y_stride);
}

}  // namespace carrel::kernels
#endif
