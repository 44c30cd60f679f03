#include "prefill/dense_attention.h"

#include <algorithm>

#include "kernels/attention/prefill_attention/prefill_attention.h"
#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/of_heads.h"

namespace carrel::prefill {

// Units begin at multiples of kPrefillQueryTile, so that none packs what another does.
void DenseAttention::PackRows(Position begin, Position end) {
  constexpr int64_t kUnit = kernels::kPrefillQueryTile;
  const int64_t d = shape_.head_dim;
  if (packed_.empty()) {
    const auto floats = static_cast<size_t>(kernels::PackedPrefillRowsFloats(all_tokens(), d));
    packed_.assign(shape_.kv_heads, std::vector<float>(floats));
  }
  const int64_t first = begin / kUnit, units = (end + kUnit - 1) / kUnit - first;
  pool_->ParallelFor(units * shape_.kv_heads, [&](int64_t unit) {
    const int64_t head = unit % shape_.kv_heads, at = (first + unit / shape_.kv_heads) * kUnit;
    kernels::PackPrefillRows(k(head), v(head), std::max(begin, at), std::min(end, at + kUnit), d,
                             packed_[head].data());
  });
}

// Fewer where threads would wait: a unit is to be small beside what each has.
int64_t DenseAttention::HeadsTogether(int64_t tiles) const {
  constexpr int64_t kUnitsEach = 4;
  const int64_t group = shape_.group(), wanted = kUnitsEach * (pool_->threads() + 1);
  int64_t together = kernels::PrefillHeadsTogether(group, shape_.head_dim);
  while (together > 1 && tiles * shape_.kv_heads * ((group + together - 1) / together) < wanted)
    --together;
  return together;
}

void DenseAttention::AttendBlock(const model::AttentionInput& input, float* attended) {
  if (!windows_.empty() && windows_[input.layer.value()] > 0) {
    return AttendWindow(input, windows_[input.layer.value()], attended);
  }
  const bool pack = kernels::PrefillAttentionPacksRows();
  if (pack) PackRows(input.first_position, input.first_position + input.n);
  const int64_t d = shape_.head_dim;
  const int64_t tiles = (input.n + kernels::kPrefillQueryTile - 1) / kernels::kPrefillQueryTile;
  const int64_t together = HeadsTogether(tiles), parts = (shape_.group() + together - 1) / together;
  pool_->ParallelFor(tiles * shape_.kv_heads * parts, [&](int64_t unit) {
    thread_local std::vector<float> scratch;
    scratch.resize(static_cast<size_t>(kernels::PrefillAttentionScratchFloats(d, together)));
    const int64_t kv_head = unit / parts % shape_.kv_heads, first = unit % parts * together;
    const int64_t q_head = kv_head * shape_.group() + first;
    const int64_t begin = unit / parts / shape_.kv_heads * kernels::kPrefillQueryTile;
    const int64_t stride = int64_t{shape_.q_heads} * d;
    auto params = kernels::OfHeads<kernels::PrefillAttentionParams>(shape_);
    params.q = input.q + begin * stride + q_head * d;
    params.q_stride = stride;
    params.n = std::min(kernels::kPrefillQueryTile, input.n - begin);
    params.heads = std::min(together, shape_.group() - first);
    params.first_position = input.first_position + begin;
    params.k = k(kv_head);
    params.v = v(kv_head);
    if (pack) params.packed = packed_[kv_head].data();
    params.out = attended + begin * stride + q_head * d;
    params.out_stride = stride;
    kernels::PrefillAttention(params, scratch.data());
  });
}

// A token's window is a run of rows: what a decoder does with its own.
void DenseAttention::AttendWindow(const model::AttentionInput& input, int64_t window,
                                  float* attended) {
  const int64_t d = shape_.head_dim, group = shape_.group();
  const int64_t tiles = (input.n + kernels::kPrefillQueryTile - 1) / kernels::kPrefillQueryTile;
  pool_->ParallelFor(tiles * shape_.kv_heads, [&](int64_t unit) {
    thread_local std::vector<float> scratch;
    std::vector<float> lse(static_cast<size_t>(group));
    const int64_t head = unit % shape_.kv_heads;
    const int64_t begin = unit / shape_.kv_heads * kernels::kPrefillQueryTile;
    const int64_t end = std::min(begin + kernels::kPrefillQueryTile, input.n);
    scratch.resize(static_cast<size_t>(group * window));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t last = input.first_position + i + 1;
      const int64_t first = std::max<int64_t>(0, last - window);
      const int64_t at = (i * shape_.q_heads + head * group) * d;
      auto params = kernels::OfHeads<kernels::WindowAttentionParams>(shape_);
      params.q = input.q + at;
      params.k = k(head) + first * d;
      params.v = v(head) + first * d;
      params.rows = last - first;
      params.out = attended + at;
      params.lse = lse.data();
      kernels::WindowAttention(params, scratch.data());
    }
  });
}

}  // namespace carrel::prefill
