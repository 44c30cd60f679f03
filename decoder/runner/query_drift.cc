#include "decoder/runner/query_drift.h"

#include <utility>

#include "common/status.h"
#include "kernels/encode/query_drift/query_drift.h"
#include "kernels/layer/rope/rope.h"

namespace carrel::decoder {

absl::Status CheckDrift(const StoredDrift& drift, const AttentionShape& shape) {
  if (drift.empty()) return absl::OkStatus();
  if (static_cast<int32_t>(drift.size()) != shape.layers) {
    return absl::DataLossError(
        absl::StrCat("reply: query drift of ", drift.size(), " layers, expected ", shape.layers));
  }
  for (const std::vector<float>& of_layer : drift) {
    const int64_t numbers = int64_t{shape.q_heads} * shape.head_dim;
    if (of_layer.empty() || static_cast<int64_t>(of_layer.size()) == numbers) continue;
    return absl::DataLossError(
        absl::StrCat("reply: query drift is ", of_layer.size(), " numbers, expected ", numbers));
  }
  return absl::OkStatus();
}

QueryDrift::QueryDrift(const AttentionShape& shape, std::vector<float> inv_freq, StoredDrift stored)
    : shape_(shape),
      inv_freq_(std::move(inv_freq)),
      stored_(std::move(stored)),
      layers_(static_cast<size_t>(shape.layers)) {
  CARREL_CHECK(inv_freq_.empty() ||
               static_cast<int64_t>(inv_freq_.size()) * 2 == int64_t{shape.head_dim});
  CARREL_CHECK(stored_.empty() || stored_.size() == layers_.size());
  StartSequence();
}

void QueryDrift::Correct(Layer layer, int64_t n, Position first_position, float* predicted_q) {
  OfLayer& of = layers_[static_cast<size_t>(layer.value())];
  for (int64_t i = 0; of.tokens > 0 && i < n; ++i) {
    scratch_ = of.mean;
    if (!inv_freq_.empty()) {
      kernels::Rope(scratch_.data(), 1, shape_.q_heads, shape_.head_dim, first_position + i,
                    inv_freq_.data());
    }
    float* q = predicted_q + i * width();
    for (int64_t c = 0; c < width(); ++c) q[c] += scratch_[static_cast<size_t>(c)];
  }
  of.predicted_q.assign(predicted_q, predicted_q + n * width());
}

void QueryDrift::Learn(Layer layer, int64_t n, Position first_position, const float* q) {
  OfLayer& of = layers_[static_cast<size_t>(layer.value())];
  if (n == 0 || static_cast<int64_t>(of.predicted_q.size()) != n * width()) return;
  of.mean.resize(static_cast<size_t>(width()), 0.0f);
  scratch_.resize(static_cast<size_t>(2 * width()));
  kernels::QueryDriftParams params;
  params.q = q;
  params.predicted_q = of.predicted_q.data();
  params.n = n;
  params.heads = shape_.q_heads;
  params.head_dim = shape_.head_dim;
  params.first_position = first_position;
  params.inv_freq = inv_freq_.empty() ? nullptr : inv_freq_.data();
  params.newest = kNewestDrift;
  params.mean = of.mean.data();
  params.tokens = &of.tokens;
  params.scratch = scratch_.data();
  kernels::LearnQueryDrift(params);
  of.predicted_q.clear();
}

void QueryDrift::StartSequence() {
  for (size_t l = 0; l < layers_.size(); ++l) {
    layers_[l] = OfLayer();
    if (stored_.empty() || stored_[l].empty()) continue;
    layers_[l].mean = stored_[l];
    layers_[l].tokens = kStoredDriftTokens;
  }
}

}  // namespace carrel::decoder
