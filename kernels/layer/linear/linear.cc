#include "kernels/layer/linear/linear.h"

#include <cblas.h>

#include <algorithm>
#include <type_traits>

#include "kernels/amx.h"
#include "kernels/layer/linear/split_gemm.h"
#include "kernels/read_ahead.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/layer/linear/linear.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

// Loops over what lives in registers.
#undef CARREL_UNROLL
#define CARREL_UNROLL _Pragma("GCC unroll 8")

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

template <class E>
void WidenElements(const void* in, int64_t count, float* out) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* bytes = static_cast<const uint8_t*>(in);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(E::Load(d, bytes, i), d, out + i);
  if (i < count) StorePartial(d, E::LoadPartial(d, bytes, i, count - i), out + i, count - i);
}

void WidenImpl(DType dtype, const void* in, int64_t count, float* out) {
  if (dtype == DType::kBf16) return WidenElements<Bf16Element>(in, count, out);
  if (dtype == DType::kF16) return WidenElements<F16Element>(in, count, out);
  WidenElements<F32Element>(in, count, out);
}

// Tokens that rows are multiplied with at a time: sums for two rows must fit 32 or 16 registers.
constexpr int kGemvTokens = HWY_TARGET == HWY_AVX2 ? 2 : 4;

// What R rows have summed up with each of N tokens. Two sums each, the same for every R and N: one
// alone would wait for itself.
template <int R, int N>
struct GemvSums {
  FloatVec first[R][N], next[R][N];
};

template <class E, int R, int N>
HWY_INLINE void AddColumns(const uint8_t* const (&rows)[R], int64_t c, const float* x,
                           int64_t x_stride, int64_t ahead, GemvSums<R, N>& sums) {
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  FloatVec first[R], next[R];
  CARREL_UNROLL
  for (int r = 0; r < R; ++r) {
    for (int64_t b = 0; b < 2 * lanes * E::kBytes; b += 64)
      AskFor(rows[r] + c * E::kBytes + b, ahead);
    first[r] = E::Load(d, rows[r], c);
    next[r] = E::Load(d, rows[r], c + lanes);
  }
  CARREL_UNROLL
  for (int h = 0; h < N; ++h) {
    const FloatVec token = hn::LoadU(d, x + h * x_stride + c);
    const FloatVec token_next = hn::LoadU(d, x + h * x_stride + c + lanes);
    CARREL_UNROLL
    for (int r = 0; r < R; ++r) {
      sums.first[r][h] = hn::MulAdd(first[r], token, sums.first[r][h]);
      sums.next[r][h] = hn::MulAdd(next[r], token_next, sums.next[r][h]);
    }
  }
}

// `width` <= Lanes columns from c on.
template <class E, int R, int N>
HWY_INLINE void AddLastColumns(const uint8_t* const (&rows)[R], int64_t c, int64_t width,
                               const float* x, int64_t x_stride, GemvSums<R, N>& sums) {
  const FloatTag d;
  const bool whole = width == static_cast<int64_t>(hn::Lanes(d));
  CARREL_UNROLL
  for (int r = 0; r < R; ++r) {
    const FloatVec row = whole ? E::Load(d, rows[r], c) : E::LoadPartial(d, rows[r], c, width);
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) {
      const float* at = x + h * x_stride + c;
      const FloatVec token = whole ? hn::LoadU(d, at) : LoadPartial(d, at, width);
      sums.first[r][h] = hn::MulAdd(row, token, sums.first[r][h]);
    }
  }
}

template <class E, int R, int N>
HWY_INLINE void MultiplyRows(const uint8_t* const (&rows)[R], int64_t in, const float* x,
                             int64_t x_stride, FloatVec (*out)[N]) {
  const FloatTag d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  GemvSums<R, N> sums;
  CARREL_UNROLL
  for (int r = 0; r < R; ++r) {
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) sums.first[r][h] = sums.next[r][h] = hn::Zero(d);
  }
  int64_t c = 0;
  const int64_t ahead = BytesAhead(N * in * static_cast<int64_t>(sizeof(float)), 4096);
  for (; c + 2 * lanes <= in; c += 2 * lanes) AddColumns<E>(rows, c, x, x_stride, ahead, sums);
  for (; c < in; c += lanes) {
    AddLastColumns<E>(rows, c, std::min(lanes, in - c), x, x_stride, sums);
  }
  CARREL_UNROLL
  for (int r = 0; r < R; ++r) {
    CARREL_UNROLL
    for (int h = 0; h < N; ++h) out[r][h] = hn::Add(sums.first[r][h], sums.next[r][h]);
  }
}

// For one token a single stream of rows, which the hardware likes best; for more, two at a time, so
// that tokens are read half as often.
template <class E, int N>
void GemvTokens(const float* x, int64_t x_stride, const WeightMatrix& w, float* y,
                int64_t y_stride) {
  constexpr int kRows = N == 1 ? 1 : 2;
  const auto* data = static_cast<const uint8_t*>(w.data);
  for (int64_t j = 0; j < w.out; j += 4) {
    // A last group of fewer than four repeats its last row.
    const int64_t real = std::min<int64_t>(4, w.out - j);
    FloatVec sums[4][N];
    for (int64_t r = 0; r < 4; r += kRows) {
      const uint8_t* rows[kRows];
      for (int k = 0; k < kRows; ++k) {
        rows[k] = data + (j + std::min(r + k, real - 1)) * w.in * E::kBytes;
      }
      MultiplyRows<E>(rows, w.in, x, x_stride, sums + r);
    }
    for (int h = 0; h < N; ++h) {
      float four[4];
      SumOfLanes4(sums[0][h], sums[1][h], sums[2][h], sums[3][h], four);
      for (int64_t r = 0; r < real; ++r) y[h * y_stride + j + r] = four[r];
    }
  }
}

template <class E>
void GemvRows(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
              int64_t y_stride) {
  int64_t i = 0;
  const auto run = [&]<int N>(std::integral_constant<int, N>) HWY_ATTR {
    GemvTokens<E, N>(x + i * x_stride, x_stride, w, y + i * y_stride, y_stride);
    i += N;
  };
  while (i + kGemvTokens <= n) run(std::integral_constant<int, kGemvTokens>());
  if (i + 2 <= n) run(std::integral_constant<int, 2>());
  if (i < n) run(std::integral_constant<int, 1>());
}

// Up to four tokens share one pass over the rows of w, in the dtype that they have.
void GemvImpl(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
              int64_t y_stride) {
  if (w.dtype == DType::kBf16) return GemvRows<Bf16Element>(x, n, x_stride, w, y, y_stride);
  if (w.dtype == DType::kF16) return GemvRows<F16Element>(x, n, x_stride, w, y, y_stride);
  GemvRows<F32Element>(x, n, x_stride, w, y, y_stride);
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(WidenImpl);
HWY_EXPORT(GemvImpl);

namespace {

// Output rows widened at a time: one panel stays in the L2 cache for `in` up to 1024.
constexpr int64_t kPanelRows = 128;

// Callers bring their own threads.
void KeepOneThread() {
  static const bool one_thread = (openblas_set_num_threads(1), true);
  static_cast<void>(one_thread);
}

void AddBias(const WeightMatrix& w, int64_t n, float* y, int64_t y_stride) {
  if (w.bias == nullptr) return;
  for (int64_t o = 0; o < w.out; ++o) {
    float bias;
    WidenToFloat(w.dtype, static_cast<const uint8_t*>(w.bias) + o * DTypeBytes(w.dtype), 1, &bias);
    for (int64_t i = 0; i < n; ++i) y[i * y_stride + o] += bias;
  }
}

void Gemv(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
          int64_t y_stride) {
  HWY_DYNAMIC_DISPATCH(GemvImpl)(x, n, x_stride, w, y, y_stride);
  AddBias(w, n, y, y_stride);
}

// Only where the product is as good as one of f32: f16 has no exact part of bf16.
bool InParts(const WeightMatrix& w) { return w.dtype == DType::kBf16 && AmxUsed(); }

void GemmInParts(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
                 int64_t y_stride, float* scratch) {
  const auto widen = [&](int64_t begin, int64_t end, float* rows) {
    HWY_DYNAMIC_DISPATCH(WidenImpl)
    (w.dtype, w.Rows(begin, end).data, (end - begin) * w.in, rows);
  };
  SplitGemm(x, n, x_stride, w.out, w.in, true, widen, y, y_stride, scratch);
  AddBias(w, n, y, y_stride);
}

void Gemm(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
          int64_t y_stride, float* scratch) {
  if (InParts(w)) return GemmInParts(x, n, x_stride, w, y, y_stride, scratch);
  float* bias = scratch;
  float* panel = scratch + kPanelRows;
  for (int64_t o = 0; o < w.out; o += kPanelRows) {
    const WeightMatrix part = w.Rows(o, std::min(w.out, o + kPanelRows));
    HWY_DYNAMIC_DISPATCH(WidenImpl)(part.dtype, part.data, part.out * part.in, panel);
    if (part.bias != nullptr) {
      HWY_DYNAMIC_DISPATCH(WidenImpl)(part.dtype, part.bias, part.out, bias);
    }
    if (part.bias != nullptr) {
      for (int64_t i = 0; i < n; ++i) std::copy_n(bias, part.out, y + i * y_stride + o);
    }
    MultiplyPanel(x, n, x_stride, panel, part.out, part.in, part.bias != nullptr, y + o, y_stride);
  }
}

}  // namespace

WeightMatrix WeightMatrix::Rows(int64_t begin, int64_t end) const {
  WeightMatrix part = *this;
  part.data = static_cast<const uint8_t*>(data) + begin * in * DTypeBytes(dtype);
  part.out = end - begin;
  if (bias != nullptr) part.bias = static_cast<const uint8_t*>(bias) + begin * DTypeBytes(dtype);
  return part;
}

int64_t LinearScratchFloats(const WeightMatrix& w) {
  const int64_t in_parts = InParts(w) ? SplitGemmScratchFloats(w.in) : 0;
  return std::max(in_parts, kPanelRows + std::min(w.out, kPanelRows) * w.in);
}

void Linear(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
            int64_t y_stride, float* scratch) {
  // A last tile of few tokens goes the same way as a call with just these.
  const int64_t last = n % kLinearTokenTile;
  const int64_t gemm = last < kLinearGemmTokens ? n - last : n;
  if (gemm > 0) Gemm(x, gemm, x_stride, w, y, y_stride, scratch);
  if (gemm < n) Gemv(x + gemm * x_stride, n - gemm, x_stride, w, y + gemm * y_stride, y_stride);
}

void MultiplyPanel(const float* x, int64_t n, int64_t x_stride, const float* panel, int64_t out,
                   int64_t in, bool accumulate, float* y, int64_t y_stride) {
  KeepOneThread();
  // One call per token tile: a library may split or order its sums by the number of tokens.
  for (int64_t i = 0; i < n; i += kLinearTokenTile) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans,
                static_cast<blasint>(std::min(kLinearTokenTile, n - i)), static_cast<blasint>(out),
                static_cast<blasint>(in), 1.0f, x + i * x_stride, static_cast<blasint>(x_stride),
                panel, static_cast<blasint>(in), accumulate ? 1.0f : 0.0f, y + i * y_stride,
                static_cast<blasint>(y_stride));
  }
}

void AddOuterProducts(const float* a, int64_t m, const float* b, int64_t n, int64_t rows,
                      float* sums) {
  if (m == 0 || n == 0 || rows == 0) return;
  KeepOneThread();
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, static_cast<blasint>(m),
              static_cast<blasint>(n), static_cast<blasint>(rows), 1.0f, a, static_cast<blasint>(m),
              b, static_cast<blasint>(n), 1.0f, sums, static_cast<blasint>(n));
}

}  // namespace carrel::kernels
#endif
