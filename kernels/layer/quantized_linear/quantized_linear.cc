#include "kernels/layer/quantized_linear/quantized_linear.h"

#include <algorithm>
#include <cstring>

#include "kernels/amx.h"
#include "kernels/layer/linear/linear.h"
#include "kernels/layer/linear/split_gemm.h"
#include "kernels/layer/quantized_linear/packed_chunk.h"

// Highway leaves this target out unless it is asked for.
#define HWY_WANT_AVX3_DL 1

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layer/quantized_linear/quantized_linear.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
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

// For few tokens, or for panels.
void PackImpl([[maybe_unused]] GgufType type, [[maybe_unused]] bool panels,
              [[maybe_unused]] const float* x, [[maybe_unused]] int64_t n,
              [[maybe_unused]] int64_t x_stride, [[maybe_unused]] int64_t in,
              [[maybe_unused]] PackedChunk* packed) {
#if CARREL_BLOCK_PRODUCTS
  for (int64_t i = 0; i < n; ++i, x += x_stride, packed += PackedChunks(in)) {
    if (panels) {
      PackInput<WordOrder::kGroups>(x, in, type == GgufType::kQ6_K ? kFoldedTop : kTop, packed);
    } else if (type == GgufType::kQ4_K || type == GgufType::kQ5_K) {
      PackInput<WordOrder::kHalvesApart>(x, in, kTop, packed);
    } else if (type == GgufType::kQ6_K || type == GgufType::kQ8_0) {
      PackInput<WordOrder::kHalves>(x, in, kTop, packed);
    } else {
      PackInput<WordOrder::kQuarters>(x, in, kTop, packed);
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

bool PanelsImpl() { return CARREL_WORD_PANELS; }

// Tokens packed for panels.
void PanelProductsImpl([[maybe_unused]] const PackedChunk* packed, [[maybe_unused]] int64_t n,
                       [[maybe_unused]] const QuantizedMatrix& w, [[maybe_unused]] float* y,
                       [[maybe_unused]] int64_t y_stride, [[maybe_unused]] float* room) {
#if CARREL_WORD_PANELS
  WithProduct(w.type, [&]<class Product>(Product) HWY_ATTR {
    MultiplyByPanels<Product>(static_cast<const uint8_t*>(w.data), w.in, w.out, n, packed, y,
                              y_stride, room);
  });
#endif
}

// n < kQuantizedGemmTokens; packed: the same tokens, if the type HasBlockProducts.
void BlockProductsImpl(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                       [[maybe_unused]] const PackedChunk* packed, float* y, int64_t y_stride,
                       float* scratch) {
#if CARREL_BLOCK_PRODUCTS
  if (HasBlockProducts(w.type)) {
    return WithProduct(w.type, [&]<class Product>(Product) HWY_ATTR {
      MultiplyInputs<Product>(static_cast<const uint8_t*>(w.data), w.in, w.out, n, packed, y,
                              y_stride);
    });
  }
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
HWY_EXPORT(PanelsImpl);
HWY_EXPORT(PanelProductsImpl);
HWY_EXPORT(BlockProductsImpl);

namespace {

// Output rows widened at a time: one panel stays in the L2 cache for `in` up to 1024.
constexpr int64_t kPanelRows = 128;

// Rows of f32 and f16 keep products of f32; decision 046 has what parts cost the others.
bool InParts(const QuantizedMatrix& w) {
  return (w.type == GgufType::kBf16 || TraitsOf(w.type).quantized) && AmxUsed();
}

bool InPanels(const QuantizedMatrix& w) {
  return HasBlockProducts(w.type) && !InParts(w) && HWY_DYNAMIC_DISPATCH(PanelsImpl)();
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

// Of n tokens those that go together: whole tiles, and a last one of kQuantizedGemmTokens and more.
// The others go the same way as in a call with just these.
int64_t GemmTokens(int64_t n) {
  const int64_t last = n % kLinearTokenTile;
  return last < kQuantizedGemmTokens ? n - last : n;
}

void Pack(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w, bool panels,
          float* packed) {
  HWY_DYNAMIC_DISPATCH(PackImpl)
  (w.type, panels, x, n, x_stride, w.in, reinterpret_cast<PackedChunk*>(packed));
}

void MultiplyPanels(const float* packed, int64_t n, const QuantizedMatrix& w, float* y,
                    int64_t y_stride, float* scratch) {
  HWY_DYNAMIC_DISPATCH(PanelProductsImpl)
  (reinterpret_cast<const PackedChunk*>(packed), n, w, y, y_stride, FromCacheLine(scratch));
}

// n = GemmTokens(n): by panels of words, in parts of bf16 or, as Linear does, by OpenBLAS.
void Gemm(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w, float* y,
          int64_t y_stride, float* scratch, const float* packed) {
  if (InParts(w)) {
    const auto widen = [&](int64_t begin, int64_t end, float* rows) {
      Widen(w.type, w.Rows(begin, end).data, (end - begin) * w.in, rows);
    };
    return SplitGemm(x, n, x_stride, w.out, w.in, w.type == GgufType::kBf16, widen, y, y_stride,
                     scratch);
  }
  if (InPanels(w)) {
    if (packed != nullptr) return MultiplyPanels(packed, n, w, y, y_stride, scratch);
    float* const own = scratch + PanelFloats(w);
    for (int64_t i = 0; i < n; i += kPackTokens) {
      const int64_t count = std::min(kPackTokens, n - i);
      Pack(x + i * x_stride, count, x_stride, w, true, own);
      MultiplyPanels(own, count, w, y + i * y_stride, y_stride, scratch);
    }
    return;
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

int64_t PackedTokensFloats(const QuantizedMatrix& w, int64_t n) {
  if (!HasBlockProducts(w.type) || (n >= kQuantizedGemmTokens && !InPanels(w))) return 0;
  return n * PackedChunks(w.in) * kChunkFloats;
}

void PackTokens(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                float* packed) {
  if (PackedTokensFloats(w, n) == 0) return;
  const int64_t gemm = GemmTokens(n);
  Pack(x, gemm, x_stride, w, true, packed);
  Pack(x + gemm * x_stride, n - gemm, x_stride, w, false,
       packed + gemm * PackedChunks(w.in) * kChunkFloats);
}

int64_t QuantizedLinearScratchFloats(const QuantizedMatrix& w) {
  if (InParts(w)) return std::max(kPanelRows * w.in, SplitGemmScratchFloats(w.in));
  if (InPanels(w)) return PanelFloats(w) + PackedTokensFloats(w, kPackTokens);
  return std::max(kPanelRows * w.in, PackedTokensFloats(w, kQuantizedGemmTokens - 1));
}

void Widen(GgufType type, const void* blocks, int64_t count, float* out) {
  HWY_DYNAMIC_DISPATCH(WidenImpl)(type, blocks, count, out);
}

void QuantizedLinear(const float* x, int64_t n, int64_t x_stride, const QuantizedMatrix& w,
                     float* y, int64_t y_stride, float* scratch, const float* packed) {
  const int64_t gemm = GemmTokens(n);
  if (gemm > 0) Gemm(x, gemm, x_stride, w, y, y_stride, scratch, packed);
  if (gemm < n) {
    if (packed == nullptr) {
      PackTokens(x + gemm * x_stride, n - gemm, x_stride, w, scratch);
      packed = scratch;
    } else {
      packed += gemm * PackedChunks(w.in) * kChunkFloats;
    }
    HWY_DYNAMIC_DISPATCH(BlockProductsImpl)
    (x + gemm * x_stride, n - gemm, x_stride, w, reinterpret_cast<const PackedChunk*>(packed),
     y + gemm * y_stride, y_stride, scratch);
  }
  AddBias(w, n, y, y_stride);
}

}  // namespace carrel::kernels
#endif
