#include "prefill/layer_attention.h"

#include <cstring>
#include <utility>

#include "common/dtype.h"
#include "common/status.h"
#include "kernels/layer/rope/rope.h"

namespace carrel::prefill {

LayerAttention::LayerAttention(const AttentionShape& shape, int64_t tokens,
                               std::vector<Position> sample_positions, std::vector<float> undo_rope,
                               ThreadPool* pool, int64_t probe)
    : shape_(shape),
      pool_(pool),
      tokens_(tokens),
      probe_(probe),
      sample_positions_(std::move(sample_positions)),
      turn_back_(std::move(undo_rope)) {
  CARREL_CHECK(turn_back_.empty() || probe == 0);
  for (float& frequency : turn_back_) frequency = -frequency;
  const size_t row_floats = static_cast<size_t>(all_tokens()) * shape.head_dim;
  k_.assign(shape.kv_heads, std::vector<float>(row_floats));
  v_.assign(shape.kv_heads, std::vector<float>(row_floats));
  queries_.resize(shape.kv_heads);
  probe_queries_.resize(shape.kv_heads);
}

void LayerAttention::CollectRows(const model::AttentionInput& input) {
  constexpr int64_t kPartTokens = 256;
  const int64_t d = shape_.head_dim;
  pool_->ParallelFor((input.n + kPartTokens - 1) / kPartTokens, [&](int64_t part) {
    const int64_t end = std::min(input.n, (part + 1) * kPartTokens);
    for (int64_t i = part * kPartTokens; i < end; ++i) {
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        const int64_t from = (i * shape_.kv_heads + head) * d;
        const int64_t to = (input.first_position + i) * d;
        std::memcpy(&k_[head][to], input.k + from, d * sizeof(float));
        std::memcpy(&v_[head][to], input.v + from, d * sizeof(float));
      }
    }
  });
}

void LayerAttention::CollectQueries(const model::AttentionInput& input, int64_t i,
                                    std::vector<std::vector<float>>& queries) const {
  const int64_t group_floats = int64_t{shape_.group()} * shape_.head_dim;
  for (int32_t head = 0; head < shape_.kv_heads; ++head) {
    // q heads of a group are neighbours
    const float* q = input.q + (i * shape_.kv_heads + head) * group_floats;
    queries[head].insert(queries[head].end(), q, q + group_floats);
  }
}

// RoPE at a negative angle is its inverse.
void LayerAttention::UndoRope() {
  const int64_t d = shape_.head_dim, group = shape_.group();
  pool_->ParallelFor(shape_.kv_heads, [&](int64_t head) {
    kernels::Rope(k_[head].data(), tokens_, 1, d, 0, turn_back_.data());
    for (size_t i = 0; i < sample_positions_.size(); ++i) {
      kernels::Rope(&queries_[head][i * static_cast<size_t>(group * d)], 1, group, d,
                    sample_positions_[i], turn_back_.data());
    }
  });
}

absl::Status LayerAttention::Collect(const model::AttentionInput& input) {
  const bool behind = filled_ >= tokens_;
  CARREL_CHECK(input.first_position == filled_ &&
               filled_ + input.n <= (behind ? all_tokens() : tokens_));
  CollectRows(input);
  filled_ += input.n;
  for (int64_t i = 0; behind && i < input.n; ++i) CollectQueries(input, i, probe_queries_);
  for (; next_sample_ < sample_positions_.size() && sample_positions_[next_sample_] < filled_;
       ++next_sample_) {
    CollectQueries(input, sample_positions_[next_sample_] - input.first_position, queries_);
  }
  return absl::OkStatus();
}

absl::Status LayerAttention::Attend(const model::AttentionInput& input, float* attended) {
  RETURN_IF_ERROR(Collect(input));
  AttendBlock(input, attended);
  return absl::OkStatus();
}

void LayerAttention::TakeProbe(ProbeRows& probe) {
  probe.tokens = probe_;
  probe.queries = std::move(probe_queries_);
  const auto first = static_cast<size_t>(tokens_ * shape_.head_dim);
  for (int32_t head = 0; head < shape_.kv_heads; ++head) {
    for (const auto& [from, to] : {std::pair{&k_, &probe.k}, {&v_, &probe.v}}) {
      const absl::Span<const float> rows = absl::MakeConstSpan((*from)[head]).subspan(first);
      FloatToBf16(rows, to->emplace_back(rows.size()).data());
    }
  }
  probe_queries_.assign(shape_.kv_heads, {});
}

LayerRows LayerAttention::TakeLayer(Layer layer) {
  CARREL_CHECK(filled_ == all_tokens() && next_sample_ == sample_positions_.size());
  if (!turn_back_.empty()) UndoRope();
  LayerRows rows;
  rows.layer = layer;
  rows.sample_positions = sample_positions_;
  rows.queries = std::move(queries_);
  rows.k.resize(shape_.kv_heads);
  rows.v.resize(shape_.kv_heads);
  pool_->ParallelFor(2 * shape_.kv_heads, [&](int64_t unit) {
    const std::vector<float>& from = unit % 2 == 0 ? k_[unit / 2] : v_[unit / 2];
    RowArray& to = unit % 2 == 0 ? rows.k[unit / 2] : rows.v[unit / 2];
    to.resize(static_cast<size_t>(tokens_ * shape_.head_dim));
    FloatToBf16(absl::MakeConstSpan(from).first(to.size()), to.data());
  });
  if (probe_ > 0) TakeProbe(rows.probe);
  queries_.assign(shape_.kv_heads, {});
  filled_ = 0;
  next_sample_ = 0;
  return rows;
}

}  // namespace carrel::prefill
