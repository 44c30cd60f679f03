// What:   the two passes over rows of any element type, lying anywhere: inner products with a few
//         vectors, and weighted sums; each row is read from memory once for all of them.
// Math:   ScoreRows: out[h, j] = scale * <x[h], row[j]>;
//         AddWeightedRows: out[h, c] += sum_j weights.At(h, j) * row[j][c].
// Threads: the value of one (h, j) or (h, c) does not depend on how many others are computed.
#if defined(CARREL_KERNELS_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CARREL_KERNELS_ROWS_INL_H_
#undef CARREL_KERNELS_ROWS_INL_H_
#else
#define CARREL_KERNELS_ROWS_INL_H_
#endif

#include <algorithm>

#include "hwy/cache_control.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// Vectors held against a row at a time: 4 sums for each, the rows and one more must fit 32 or 16
// registers.
inline constexpr int64_t kRowVectors = HWY_TARGET == HWY_AVX2 ? 2 : 4;

// run(h, std::index_sequence): as many vectors from h on as are held at a time, what is left of them at
// once: two passes would read and widen every row twice.
template <class Run>
HWY_INLINE void RunVectors(int64_t vectors, const Run& run) {
  int64_t h = 0;
  for (; h + kRowVectors <= vectors; h += kRowVectors) {
    run(h, std::make_index_sequence<kRowVectors>());
  }
  const int64_t left = vectors - h;
  if constexpr (kRowVectors > 3) {
    if (left == 3) run(h, std::make_index_sequence<3>());
  }
  if constexpr (kRowVectors > 2) {
    if (left == 2) run(h, std::make_index_sequence<2>());
  }
  if (left == 1) run(h, std::make_index_sequence<1>());
}

// The L1 cache waits for few lines at a time, and the rows that are needed now are among them.
HWY_INLINE void PrefetchToL2(const uint8_t* at) { __builtin_prefetch(at, 0, 2); }

template <class E>
struct ContiguousRows {
  using Element = E;
  const void* data;
  int64_t dim;
  const uint8_t* Row(int64_t j) const {
    return static_cast<const uint8_t*>(data) + j * dim * E::kBytes;
  }
  // The hardware sees the stream by itself, but stops at each page.
  static constexpr int64_t kAhead = 64;
  HWY_INLINE void Prefetch(int64_t j, int64_t count) const {
    if (j >= count) return;
    const int64_t bytes = dim * E::kBytes;
    for (int64_t b = 0; b < bytes; b += 64) PrefetchToL2(Row(j) + b);
  }
};

template <class E>
struct ScatteredRows {
  using Element = E;
  const void* const* rows;
  int64_t dim;
  const uint8_t* Row(int64_t j) const { return static_cast<const uint8_t*>(rows[j]); }
  // Rows asked for before those that are added up.
  static constexpr int64_t kAhead = 64;
  // Asks for row j, if there is one. Inline in any case: GCC takes a call of a function that only asks
  // for one without effect, and leaves it out.
  HWY_INLINE void Prefetch(int64_t j, int64_t count) const {
    if (j >= count) return;
    const uint8_t* row = Row(j);
    const int64_t bytes = dim * E::kBytes;
    for (int64_t b = 0; b < bytes; b += 64) PrefetchToL2(row + b);
    PrefetchToL2(row + bytes - 1);  // a row that is not aligned ends a line later
  }
};

// ScoreRows asks for rows this far ahead: more than the latency of memory over the time that a row
// takes, and less than the L1 cache holds.
inline constexpr int64_t kPrefetchRows = 48;

struct FourVecs {
  FloatVec v0, v1, v2, v3;
};

HWY_INLINE void MulAddFour(FloatVec x, const FourVecs& rows, FourVecs& sums) {
  sums.v0 = hn::MulAdd(x, rows.v0, sums.v0);
  sums.v1 = hn::MulAdd(x, rows.v1, sums.v1);
  sums.v2 = hn::MulAdd(x, rows.v2, sums.v2);
  sums.v3 = hn::MulAdd(x, rows.v3, sums.v3);
}

#if HWY_TARGET != HWY_SCALAR

// Rows whose scores fill a vector; they are taken four at a time.
inline constexpr int64_t kScoreRows = static_cast<int64_t>(hn::MaxLanes(FloatTag()));
inline constexpr int64_t kScoreQuads = kScoreRows / 4;

// out[0..count), count <= kScoreRows: the scores of four rows after four.
HWY_INLINE void StoreScores(const FloatVec (&quads)[kScoreQuads], float scale, int64_t count,
                            float* out) {
  const FloatTag d;
  const FloatVec scores = hn::Mul(hn::Set(d, scale), AddBlocks(quads));
  if (count == kScoreRows) {
    hn::StoreU(scores, d, out);
  } else {
    StorePartial(d, scores, out, count);
  }
}

// quads[h][i] = the sums of <x[h], row[0..4)> by blocks of lanes.
template <class E, size_t... kH>
HWY_INLINE void ScoreFourRows(const uint8_t* const (&row)[4], int64_t dim, const float* x,
                              int64_t x_stride, int64_t i, FloatVec (*quads)[kScoreQuads],
                              std::index_sequence<kH...>) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec zero = hn::Zero(d);
  FourVecs sums[sizeof...(kH)] = {((void)kH, FourVecs{zero, zero, zero, zero})...};
  int64_t c = 0;
  for (; c + lanes <= dim; c += lanes) {
    const FourVecs rows{E::Load(d, row[0], c), E::Load(d, row[1], c), E::Load(d, row[2], c),
                        E::Load(d, row[3], c)};
    (MulAddFour(hn::LoadU(d, x + kH * x_stride + c), rows, sums[kH]), ...);
  }
  if (c < dim) {
    const int64_t tail = dim - c;
    const FourVecs rows{E::LoadPartial(d, row[0], c, tail), E::LoadPartial(d, row[1], c, tail),
                        E::LoadPartial(d, row[2], c, tail), E::LoadPartial(d, row[3], c, tail)};
    (MulAddFour(LoadPartial(d, x + kH * x_stride + c, tail), rows, sums[kH]), ...);
  }
  ((quads[kH][i] = BlockSums4(sums[kH].v0, sums[kH].v1, sums[kH].v2, sums[kH].v3)), ...);
}

// The scores of up to kScoreRows rows from j on with vectors x[kH].
template <class Rows, size_t... kH>
HWY_INLINE void ScoreSomeRows(const Rows& rows, int64_t j, int64_t count, int64_t dim,
                              const float* x, int64_t x_stride, float scale, float* out,
                              int64_t out_stride, std::index_sequence<kH...> heads) {
  const FloatTag d;
  const int64_t real = std::min(kScoreRows, count - j);
  FloatVec quads[sizeof...(kH)][kScoreQuads];
  for (int64_t i = 0; i < kScoreQuads; ++i) {
    if (4 * i >= real) {
      ((quads[kH][i] = hn::Zero(d)), ...);
      continue;
    }
    // A last group of fewer than four repeats its last row: every score is taken the same way.
    const int64_t at = j + 4 * i, last = count - 1;
    const uint8_t* const row[4] = {rows.Row(at), rows.Row(std::min(at + 1, last)),
                                   rows.Row(std::min(at + 2, last)),
                                   rows.Row(std::min(at + 3, last))};
    ScoreFourRows<typename Rows::Element>(row, dim, x, x_stride, i, quads, heads);
  }
  (StoreScores(quads[kH], scale, real, out + kH * out_stride + j), ...);
}

template <class Rows>
HWY_INLINE void ScoreRows(const Rows& rows, int64_t count, int64_t dim, const float* x,
                          int64_t vectors, int64_t x_stride, float scale, float* out,
                          int64_t out_stride) {
  for (int64_t j = 0; j < count; j += kScoreRows) {
    for (int64_t i = 0; i < kScoreRows; ++i) rows.Prefetch(j + i + kPrefetchRows, count);
    const auto run = [&](int64_t h, auto heads) HWY_ATTR {
      ScoreSomeRows(rows, j, count, dim, x + h * x_stride, x_stride, scale, out + h * out_stride,
                    out_stride, heads);
    };
    RunVectors(vectors, run);
  }
}

#else

template <class Rows>
void ScoreRows(const Rows& rows, int64_t count, int64_t dim, const float* x, int64_t vectors,
               int64_t x_stride, float scale, float* out, int64_t out_stride) {
  const FloatTag d;
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t h = 0; h < vectors; ++h) {
      FloatVec sum = hn::Zero(d);
      for (int64_t c = 0; c < dim; ++c) {
        sum = hn::MulAdd(hn::LoadU(d, x + h * x_stride + c), Rows::Element::Load(d, rows.Row(j), c),
                         sum);
      }
      out[h * out_stride + j] = scale * hn::GetLane(sum);
    }
  }
}

#endif

HWY_INLINE void AddTo(FloatTag d, FloatVec v, float* out) {
  hn::StoreU(hn::Add(hn::LoadU(d, out), v), d, out);
}

// What row j weighs for vector h.
struct StridedWeights {
  const float* weights;
  int64_t stride, first_row;
  HWY_INLINE float At(int64_t h, int64_t j) const { return weights[h * stride + j - first_row]; }
};

// Four vectors' width of columns from c on, of vectors h + kH.
template <class Rows, class Weights, size_t... kH>
HWY_INLINE void AddWideColumns(const Rows& rows, int64_t begin, int64_t end, int64_t c, int64_t h,
                               const Weights& weights, float* out, int64_t out_stride,
                               std::index_sequence<kH...>) {
  using E = typename Rows::Element;
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec zero = hn::Zero(d);
  FourVecs sums[sizeof...(kH)] = {((void)kH, FourVecs{zero, zero, zero, zero})...};
  for (int64_t j = begin; j < end; ++j) {
    const uint8_t* row = rows.Row(j);
    const FourVecs columns{E::Load(d, row, c), E::Load(d, row, c + lanes),
                           E::Load(d, row, c + 2 * lanes), E::Load(d, row, c + 3 * lanes)};
    (MulAddFour(hn::Set(d, weights.At(h + kH, j)), columns, sums[kH]), ...);
  }
  (AddTo(d, sums[kH].v0, out + kH * out_stride + c), ...);
  (AddTo(d, sums[kH].v1, out + kH * out_stride + c + lanes), ...);
  (AddTo(d, sums[kH].v2, out + kH * out_stride + c + 2 * lanes), ...);
  (AddTo(d, sums[kH].v3, out + kH * out_stride + c + 3 * lanes), ...);
}

// `width` <= Lanes columns from c on, of vectors h + kH: one sum alone would wait for each addition.
template <class Rows, class Weights, size_t... kH>
HWY_INLINE void AddNarrowColumns(const Rows& rows, int64_t begin, int64_t end, int64_t c,
                                 int64_t width, int64_t h, const Weights& weights, float* out,
                                 int64_t out_stride, std::index_sequence<kH...>) {
  using E = typename Rows::Element;
  const FloatTag d;
  const bool whole = width == static_cast<int64_t>(hn::Lanes(d));
  FloatVec sums[sizeof...(kH)] = {((void)kH, hn::Zero(d))...};
  for (int64_t j = begin; j < end; ++j) {
    const FloatVec column =
        whole ? E::Load(d, rows.Row(j), c) : E::LoadPartial(d, rows.Row(j), c, width);
    ((sums[kH] = hn::MulAdd(hn::Set(d, weights.At(h + kH, j)), column, sums[kH])), ...);
  }
  const auto add = [&](FloatVec sum, float* to) HWY_ATTR {
    if (whole) {
      AddTo(d, sum, to);
    } else {
      StorePartial(d, hn::Add(LoadPartial(d, to, width), sum), to, width);
    }
  };
  (add(sums[kH], out + kH * out_stride + c), ...);
}

// Rows [begin, end) of `count`.
template <class Rows, class Weights>
HWY_INLINE void AddWeightedRows(const Rows& rows, int64_t begin, int64_t end, int64_t count,
                                int64_t dim, const Weights& weights, int64_t vectors, float* out,
                                int64_t out_stride) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(FloatTag()));
  // The rows that come later, all at once: asked for one by one between the sums, they came late.
  for (int64_t j = begin == 0 ? 0 : begin + Rows::kAhead; j < end + Rows::kAhead; ++j) {
    rows.Prefetch(j, count);
  }
  int64_t c = 0;
  for (; c + 4 * lanes <= dim; c += 4 * lanes) {
    const auto run = [&](int64_t h, auto heads) HWY_ATTR {
      AddWideColumns(rows, begin, end, c, h, weights, out + h * out_stride, out_stride, heads);
    };
    RunVectors(vectors, run);
  }
  for (; c < dim; c += lanes) {
    const auto run = [&](int64_t h, auto heads) HWY_ATTR {
      AddNarrowColumns(rows, begin, end, c, std::min(lanes, dim - c), h, weights,
                       out + h * out_stride, out_stride, heads);
    };
    RunVectors(vectors, run);
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
