// Everything lies transposed: a panel holds two vectors' width of queries side by side, so that
// scores, maxima, exponentials and outputs of different queries sit in different lanes. K and V are
// read where they lie, one broadcast at a time, and no sum runs across lanes.
#include "kernels/attention/prefill_attention/prefill_attention.h"

#include <algorithm>

#include "common/status.h"
#include "kernels/attention/prefill_attention/prefill_attention_amx.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/prefill_attention/prefill_attention.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"
#include "kernels/tile-inl.h"

#ifndef CARREL_KERNELS_PREFILL_ATTENTION_CONSTANTS_
#define CARREL_KERNELS_PREFILL_ATTENTION_CONSTANTS_
namespace carrel::kernels {
// Keys per step of the online softmax: K and V of a step stay in the L2 cache while the panels of a
// tile pass over them, and the scores of one panel stay in L1.
inline constexpr int64_t kKeyBlock = 128;
// The widest panel of any target (two AVX-512 vectors).
inline constexpr int64_t kMaxPanel = 32;
static_assert(kPrefillQueryTile % kMaxPanel == 0);
}  // namespace carrel::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// What one panel of queries carries from key block to key block; arrays of the scratch.
struct Panel {
  float* q;    // [head_dim, width], scaled
  float* out;  // [head_dim, width], sum of weight * v
  float* max;  // [width]
  float* sum;  // [width], sum of weights
  int64_t head;
  int64_t first;  // position of the first query
  int64_t queries;
};

int64_t PanelWidth() { return 2 * static_cast<int64_t>(hn::Lanes(FloatTag())); }

void PackPanel(const PrefillAttentionParams& p, const Panel& panel) {
  const int64_t width = PanelWidth();
  std::fill_n(panel.q, p.head_dim * width, 0.0f);
  for (int64_t i = 0; i < panel.queries; ++i) {
    const float* row =
        p.q + panel.head * p.head_dim + (panel.first - p.first_position + i) * p.q_stride;
    for (int64_t c = 0; c < p.head_dim; ++c) panel.q[c * width + i] = row[c] * p.scale;
  }
  std::fill_n(panel.out, p.head_dim * width, 0.0f);
  std::fill_n(panel.max, width, -std::numeric_limits<float>::infinity());
  std::fill_n(panel.sum, width, 0.0f);
}

// Scores of keys later than a query's own become -inf. scores [keys, width], key 0 at `first_key`.
void MaskFuture(const Panel& panel, int64_t first_key, int64_t keys, float* scores) {
  const int64_t width = PanelWidth();
  for (int64_t j = std::max<int64_t>(0, panel.first + 1 - first_key); j < keys; ++j) {
    const int64_t visible_from = std::min(width, first_key + j - panel.first);
    std::fill_n(scores + j * width, visible_from, -std::numeric_limits<float>::infinity());
  }
}

// scores become weights exp(score - new maximum); `keep` [width] receives exp(old - new maximum).
void SoftmaxStep(const Panel& panel, int64_t keys, float* scores, float* keep) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t half = 0; half < 2; ++half) {
    float* column = scores + half * lanes;
    const FloatVec old_max = hn::Load(d, panel.max + half * lanes);
    FloatVec max0 = old_max, max1 = old_max;
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
      max0 = hn::Max(max0, hn::Load(d, column + j * 2 * lanes));
      max1 = hn::Max(max1, hn::Load(d, column + (j + 1) * 2 * lanes));
    }
    if (j < keys) max0 = hn::Max(max0, hn::Load(d, column + j * 2 * lanes));
    const FloatVec max = hn::Max(max0, max1);
    FloatVec sum = hn::Zero(d);
    for (j = 0; j < keys; ++j) {
      float* at = column + j * 2 * lanes;
      const FloatVec weight = Exp(d, hn::Sub(hn::Load(d, at), max));
      hn::Store(weight, d, at);
      sum = hn::Add(sum, weight);
    }
    const FloatVec kept = Exp(d, hn::Sub(old_max, max));
    hn::Store(kept, d, keep + half * lanes);
    hn::Store(max, d, panel.max + half * lanes);
    hn::Store(hn::MulAdd(hn::Load(d, panel.sum + half * lanes), kept, sum), d,
              panel.sum + half * lanes);
  }
}

// One panel passes over keys [first_key, first_key + keys).
void PanelStep(const PrefillAttentionParams& p, const Panel& panel, int64_t first_key, int64_t keys,
               float* scores, float* keep) {
  const FloatTag d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  TileRows<TileLayout::kRowMajor>(p.k + first_key * p.head_dim, p.head_dim, keys, p.head_dim,
                                  panel.q, [&](int64_t j, FloatVec s0, FloatVec s1) HWY_ATTR {
                                    hn::Store(s0, d, scores + j * 2 * lanes);
                                    hn::Store(s1, d, scores + j * 2 * lanes + lanes);
                                  });
  if (first_key + keys - 1 > panel.first) MaskFuture(panel, first_key, keys, scores);
  SoftmaxStep(panel, keys, scores, keep);
  const FloatVec keep0 = hn::Load(d, keep), keep1 = hn::Load(d, keep + lanes);
  TileRows<TileLayout::kTransposed>(p.v + first_key * p.head_dim, p.head_dim, p.head_dim, keys,
                                    scores, [&](int64_t c, FloatVec s0, FloatVec s1) HWY_ATTR {
                                      float* out = panel.out + c * 2 * lanes;
                                      hn::Store(hn::MulAdd(hn::Load(d, out), keep0, s0), d, out);
                                      hn::Store(hn::MulAdd(hn::Load(d, out + lanes), keep1, s1), d,
                                                out + lanes);
                                    });
}

void WritePanel(const PrefillAttentionParams& p, const Panel& panel) {
  const int64_t width = PanelWidth();
  for (int64_t i = 0; i < panel.queries; ++i) {
    float* row =
        p.out + panel.head * p.head_dim + (panel.first - p.first_position + i) * p.out_stride;
    const float factor = 1.0f / panel.sum[i];
    for (int64_t c = 0; c < p.head_dim; ++c) row[c] = panel.out[c * width + i] * factor;
  }
}

void PrefillAttentionImpl(const PrefillAttentionParams& p, float* scratch) {
  const int64_t width = PanelWidth();
  float* scores = scratch;
  float* keep = scores + kKeyBlock * kMaxPanel;
  float* next = keep + kMaxPanel;
  Panel panels[kMostPrefillHeads * kPrefillQueryTile / 2];  // two lanes at least
  const int64_t of_head = (p.n + width - 1) / width, count = p.heads * of_head;
  for (int64_t i = 0; i < count; ++i) {
    Panel& panel = panels[i];
    panel.q = next;
    panel.out = panel.q + p.head_dim * width;
    panel.max = panel.out + p.head_dim * width;
    panel.sum = panel.max + width;
    next = panel.sum + width;
    panel.head = i / of_head;
    const int64_t begin = i % of_head * width;
    panel.first = p.first_position + begin;
    panel.queries = std::min(width, p.n - begin);
    PackPanel(p, panel);
  }
  // Blocks begin at multiples of kKeyBlock from position 0, whatever the tile, so that a token's
  // result does not depend on the tile it is in.
  for (int64_t key = 0; key < p.first_position + p.n; key += kKeyBlock) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t visible = panels[i].first + panels[i].queries - key;
      if (visible > 0) PanelStep(p, panels[i], key, std::min(visible, kKeyBlock), scores, keep);
    }
  }
  for (int64_t i = 0; i < count; ++i) WritePanel(p, panels[i]);
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(PrefillAttentionImpl);

namespace {
constexpr int64_t kAlignFloats = 16;  // one cache line

// Queries and sums of a tile.
int64_t CarriedFloats(int64_t head_dim) { return kPrefillQueryTile * (2 * head_dim + 2); }
}  // namespace

int64_t PrefillAttentionScratchFloats(int64_t head_dim, int64_t heads) {
  return kAlignFloats + std::max(PrefillAttentionInPartsScratchFloats(head_dim, heads),
                                 (kKeyBlock + 1) * kMaxPanel + heads * CarriedFloats(head_dim));
}

int64_t PrefillHeadsTogether(int64_t group, int64_t head_dim) {
  constexpr int64_t kCarriedBytes = 512 << 10;
  const auto bytes = CarriedFloats(head_dim) * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::clamp<int64_t>(kCarriedBytes / bytes, 1, kMostPrefillHeads);
  const int64_t parts = (group + most - 1) / most;
  return (group + parts - 1) / parts;
}

void PrefillAttention(const PrefillAttentionParams& params, float* scratch) {
  CARREL_CHECK(params.heads >= 1 && params.heads <= kMostPrefillHeads);
  if (params.n == 0) return;
  const uintptr_t misaligned =
      reinterpret_cast<uintptr_t>(scratch) % (kAlignFloats * sizeof(float));
  if (misaligned != 0) scratch += kAlignFloats - misaligned / sizeof(float);
  if (params.packed != nullptr) return PrefillAttentionInParts(params, scratch);
  HWY_DYNAMIC_DISPATCH(PrefillAttentionImpl)(params, scratch);
}

}  // namespace carrel::kernels
#endif
