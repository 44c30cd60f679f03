// Queries lie transposed, two vectors' width side by side, so that a key's inner products with them
// need no sum across lanes; only their maximum does, once per key and panel.
#include "kernels/score/max_score/max_score.h"

#include <algorithm>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score/max_score/max_score.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"
#include "kernels/tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

int64_t PanelWidthImpl() { return 2 * static_cast<int64_t>(hn::Lanes(FloatTag())); }

void MaxScoreImpl(const float* panels, int64_t count, int64_t head_dim, const float* k,
                  int64_t keys, float* out) {
  const FloatTag d;
  const int64_t width = PanelWidthImpl();
  std::fill_n(out, keys, -std::numeric_limits<float>::infinity());
  // Keys of a block stay in the L1 cache while the panels pass over them.
  constexpr int64_t kKeys = 64;
  for (int64_t at = 0; at < keys; at += kKeys) {
    const int64_t n = std::min(kKeys, keys - at);
    for (int64_t p = 0; p < count; ++p) {
      TileRows<TileLayout::kRowMajor>(
          k + at * head_dim, head_dim, n, head_dim, panels + p * head_dim * width,
          [&](int64_t j, FloatVec s0, FloatVec s1) HWY_ATTR {
            const float best = hn::GetLane(hn::MaxOfLanes(d, hn::Max(s0, s1)));
            out[at + j] = std::max(out[at + j], best);
          });
    }
  }
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(PanelWidthImpl);
HWY_EXPORT(MaxScoreImpl);

QueryPanels::QueryPanels(const float* q, int64_t queries, int64_t head_dim)
    : queries_(queries), head_dim_(head_dim) {
  constexpr int64_t kAlignFloats = 16;
  const int64_t width = HWY_DYNAMIC_DISPATCH(PanelWidthImpl)();
  const int64_t panels = (queries + width - 1) / width;
  storage_.resize(static_cast<size_t>(panels * width * head_dim + kAlignFloats));
  const uintptr_t off = reinterpret_cast<uintptr_t>(storage_.data()) % (kAlignFloats * 4);
  data_ = storage_.data() + (off == 0 ? 0 : kAlignFloats - off / 4);
  for (int64_t i = 0; i < panels * width; ++i) {
    const float* row = q + std::min(i, queries - 1) * head_dim;
    float* panel = data_ + i / width * width * head_dim + i % width;
    for (int64_t c = 0; c < head_dim; ++c) panel[c * width] = row[c];
  }
}

void MaxScore(const QueryPanels& queries, const float* k, int64_t keys, float* out) {
  const int64_t width = HWY_DYNAMIC_DISPATCH(PanelWidthImpl)();
  const int64_t panels = (queries.queries() + width - 1) / width;
  HWY_DYNAMIC_DISPATCH(MaxScoreImpl)(queries.data(), panels, queries.head_dim(), k, keys, out);
}

void RefMaxScore(const float* q, int64_t queries, int64_t head_dim, const float* k, int64_t keys,
                 float* out) {
  for (int64_t j = 0; j < keys; ++j) {
    double best = -std::numeric_limits<double>::infinity();
    for (int64_t i = 0; i < queries; ++i) {
      double sum = 0;
      for (int64_t c = 0; c < head_dim; ++c)
        sum += double{q[i * head_dim + c]} * k[j * head_dim + c];
      best = std::max(best, sum);
    }
    out[j] = static_cast<float>(best);
  }
}

}  // namespace carrel::kernels
#endif
