#include "kernels/linear/linear.h"

#include <cblas.h>

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/linear/linear.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/rows-inl.h"

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

template <class E>
void GemvRows(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
              int64_t y_stride) {
  const ContiguousRows<E> rows{w.data, w.in};
  ScoreRows(rows, w.out, w.in, x, n, x_stride, 1.0f, y, y_stride);
}

// The tokens share one pass over the rows of w, in the dtype that they have.
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

void Gemv(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
          int64_t y_stride) {
  HWY_DYNAMIC_DISPATCH(GemvImpl)(x, n, x_stride, w, y, y_stride);
  if (w.bias == nullptr) return;
  for (int64_t o = 0; o < w.out; ++o) {
    float bias;
    WidenToFloat(w.dtype, static_cast<const uint8_t*>(w.bias) + o * DTypeBytes(w.dtype), 1, &bias);
    for (int64_t i = 0; i < n; ++i) y[i * y_stride + o] += bias;
  }
}

void Gemm(const float* x, int64_t n, int64_t x_stride, const WeightMatrix& w, float* y,
          int64_t y_stride, float* scratch) {
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
  return kPanelRows + std::min(w.out, kPanelRows) * w.in;
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
