#include "decoder/query_drift.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "kernels/rope/rope.h"

namespace carrel::decoder {
namespace {

constexpr float kNewest = 0.2f;  // weight of the newest token, at least

std::vector<float> Negated(std::vector<float> values) {
  for (float& value : values) value = -value;
  return values;
}

}  // namespace

QueryDrift::QueryDrift(const AttentionShape& shape, std::vector<float> inv_freq)
    : shape_(shape),
      inv_freq_(std::move(inv_freq)),
      inverse_(Negated(inv_freq_)),
      layers_(static_cast<size_t>(shape.layers)) {
  CARREL_CHECK(inv_freq_.empty() ||
               static_cast<int64_t>(inv_freq_.size()) * 2 == int64_t{shape.head_dim});
}

void QueryDrift::Turn(float* x, int64_t n, Position first_position,
                      const std::vector<float>& by) const {
  if (by.empty()) return;
  kernels::Rope(x, n, shape_.q_heads, shape_.head_dim, first_position, by.data());
}

void QueryDrift::Correct(Layer layer, int64_t n, Position first_position, float* approximate_q) {
  OfLayer& of = layers_[static_cast<size_t>(layer.value())];
  of.guessed.assign(approximate_q, approximate_q + n * width());
  if (of.tokens == 0) return;
  for (int64_t i = 0; i < n; ++i) {
    scratch_ = of.mean;
    Turn(scratch_.data(), 1, first_position + i, inv_freq_);
    float* q = approximate_q + i * width();
    for (int64_t c = 0; c < width(); ++c) q[c] += scratch_[static_cast<size_t>(c)];
  }
}

void QueryDrift::Learn(Layer layer, int64_t n, Position first_position, const float* q) {
  OfLayer& of = layers_[static_cast<size_t>(layer.value())];
  if (n == 0 || static_cast<int64_t>(of.guessed.size()) != n * width()) return;
  scratch_.resize(of.guessed.size());
  for (size_t c = 0; c < scratch_.size(); ++c) scratch_[c] = q[c] - of.guessed[c];
  Turn(scratch_.data(), n, first_position, inverse_);
  of.mean.resize(static_cast<size_t>(width()), 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    const float weight = std::max(kNewest, 1.0f / static_cast<float>(++of.tokens));
    const float* lacking = scratch_.data() + i * width();
    for (int64_t c = 0; c < width(); ++c) {
      float& mean = of.mean[static_cast<size_t>(c)];
      mean += weight * (lacking[c] - mean);
    }
  }
  of.guessed.clear();
}

void QueryDrift::StartSequence() {
  for (OfLayer& of : layers_) of = OfLayer();
}

}  // namespace carrel::decoder
