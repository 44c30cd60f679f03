#include "prefill/dense_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/dtype.h"
#include "common/status.h"
#include "kernels/prefill_attention/prefill_attention.h"

namespace carrel::prefill {

DenseAttention::DenseAttention(const AttentionShape& shape, int64_t tokens,
                               std::vector<Position> sample_positions, ThreadPool* pool)
    : shape_(shape),
      tokens_(tokens),
      sample_positions_(std::move(sample_positions)),
      pool_(pool),
      scale_(1.0f / std::sqrt(static_cast<float>(shape.head_dim))) {
  const size_t row_floats = static_cast<size_t>(tokens) * shape.head_dim;
  k_.assign(shape.kv_heads, std::vector<float>(row_floats));
  v_.assign(shape.kv_heads, std::vector<float>(row_floats));
  queries_.resize(shape.kv_heads);
}

void DenseAttention::CollectRows(const model::AttentionInput& input) {
  const int64_t d = shape_.head_dim;
  for (int64_t i = 0; i < input.n; ++i) {
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      const int64_t from = (i * shape_.kv_heads + head) * d;
      const int64_t to = (input.first_position + i) * d;
      std::memcpy(&k_[head][to], input.k + from, d * sizeof(float));
      std::memcpy(&v_[head][to], input.v + from, d * sizeof(float));
    }
  }
}

void DenseAttention::CollectSamples(const model::AttentionInput& input) {
  const int64_t group_floats = int64_t{shape_.group()} * shape_.head_dim;
  const Position end = input.first_position + input.n;
  for (; next_sample_ < sample_positions_.size() && sample_positions_[next_sample_] < end;
       ++next_sample_) {
    const int64_t i = sample_positions_[next_sample_] - input.first_position;
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      const float* q = input.q + (i * shape_.kv_heads + head) *
                                     group_floats;  // q heads of a group are neighbours
      queries_[head].insert(queries_[head].end(), q, q + group_floats);
    }
  }
}

absl::Status DenseAttention::Attend(const model::AttentionInput& input, float* attended) {
  CARREL_CHECK(input.first_position == filled_ && filled_ + input.n <= tokens_);
  CollectRows(input);
  CollectSamples(input);
  filled_ += input.n;

  const int64_t d = shape_.head_dim;
  const int64_t tiles = (input.n + kernels::kPrefillQueryTile - 1) / kernels::kPrefillQueryTile;
  pool_->ParallelFor(tiles * shape_.q_heads, [&](int64_t unit) {
    thread_local std::vector<float> scratch;
    scratch.resize(static_cast<size_t>(kernels::PrefillAttentionScratchFloats(d)));
    const int64_t q_head = unit % shape_.q_heads;
    const int64_t begin = unit / shape_.q_heads * kernels::kPrefillQueryTile;
    const int64_t stride = int64_t{shape_.q_heads} * d;
    kernels::PrefillAttentionParams params;
    params.q = input.q + begin * stride + q_head * d;
    params.q_stride = stride;
    params.n = std::min(kernels::kPrefillQueryTile, input.n - begin);
    params.first_position = input.first_position + begin;
    params.k = k_[q_head / shape_.group()].data();
    params.v = v_[q_head / shape_.group()].data();
    params.head_dim = d;
    params.scale = scale_;
    params.out = attended + begin * stride + q_head * d;
    params.out_stride = stride;
    kernels::PrefillAttention(params, scratch.data());
  });
  return absl::OkStatus();
}

LayerRows DenseAttention::TakeLayer(Layer layer) {
  CARREL_CHECK(filled_ == tokens_ && next_sample_ == sample_positions_.size());
  LayerRows rows;
  rows.layer = layer;
  rows.sample_positions = sample_positions_;
  rows.queries = std::move(queries_);
  rows.k.resize(shape_.kv_heads);
  rows.v.resize(shape_.kv_heads);
  pool_->ParallelFor(2 * shape_.kv_heads, [&](int64_t unit) {
    const std::vector<float>& from = unit % 2 == 0 ? k_[unit / 2] : v_[unit / 2];
    RowArray& to = unit % 2 == 0 ? rows.k[unit / 2] : rows.v[unit / 2];
    to.resize(from.size());
    FloatToBf16(from, to.data());
  });
  queries_.assign(shape_.kv_heads, {});
  filled_ = 0;
  next_sample_ = 0;
  return rows;
}

}  // namespace carrel::prefill
