#include "lab/methods/channel_labels.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/dtype.h"
#include "common/status.h"
#include "decoder/select/key_scores.h"

namespace carrel::decoder {
namespace {

std::vector<double> MeanAbsolute(const float* x, int64_t n, int64_t d) {
  std::vector<double> mean(static_cast<size_t>(d));
  for (int64_t i = 0; i < n * d; ++i) mean[static_cast<size_t>(i % d)] += std::abs(x[i]);
  return mean;
}

// The mean is over as many values in every channel, so sums rank as well.
absl::StatusOr<std::vector<double>> Importance(ChannelScore by, const HostRows& rows, Layer layer,
                                               KvHead head, const std::vector<float>& keys,
                                               int64_t d) {
  std::vector<double> importance(static_cast<size_t>(d), 1.0);
  if (by != ChannelScore::kK) {
    ASSIGN_OR_RETURN(const std::vector<float> queries, rows.SampledQueries(layer, head));
    importance = MeanAbsolute(queries.data(), static_cast<int64_t>(queries.size()) / d, d);
  }
  if (by != ChannelScore::kQ) {
    const std::vector<double> of_keys =
        MeanAbsolute(keys.data(), static_cast<int64_t>(keys.size()) / d, d);
    for (size_t c = 0; c < importance.size(); ++c) importance[c] *= of_keys[c];
  }
  return importance;
}

absl::StatusOr<ChannelLabels> MakeLabels(const ChannelConfig& config, const HostRows& rows,
                                         Layer layer, KvHead head, RowRange zone, int64_t d) {
  std::vector<float> keys(static_cast<size_t>(zone.rows() * d));
  for (Position row = zone.begin; row < zone.end; ++row) {
    WidenToFloat(DType::kBf16, rows.At(layer, head).Key(row), d,
                 &keys[static_cast<size_t>((row - zone.begin) * d)]);
  }
  ASSIGN_OR_RETURN(const std::vector<double> importance,
                   Importance(config.by, rows, layer, head, keys, d));
  ChannelLabels labels;
  const int64_t count = ChannelsKept(config, d);
  labels.channels = BestIndices(std::vector<float>(importance.begin(), importance.end()), count);
  labels.bytes.assign(static_cast<size_t>(zone.rows() * count / 2), 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t c = labels.channels[static_cast<size_t>(i)];
    float low = INFINITY, high = -INFINITY;
    for (int64_t j = 0; j < zone.rows(); ++j) {
      low = std::min(low, keys[static_cast<size_t>(j * d + c)]);
      high = std::max(high, keys[static_cast<size_t>(j * d + c)]);
    }
    const float step = high > low ? (high - low) / (kChannelLevels - 1) : 0;
    labels.least.push_back(low);
    labels.step.push_back(step);
    for (int64_t j = 0; step > 0 && j < zone.rows(); ++j) {
      const float level = (keys[static_cast<size_t>(j * d + c)] - low) / step;
      const auto nibble =
          static_cast<uint8_t>(std::clamp<long>(std::lround(level), 0, kChannelLevels - 1));
      uint8_t& byte = labels.bytes[static_cast<size_t>(j * count / 2 + i / 2)];
      byte = static_cast<uint8_t>(byte | nibble << (i % 2 * 4));
    }
  }
  return labels;
}

}  // namespace

int64_t ChannelsKept(const ChannelConfig& config, int64_t head_dim) {
  const int64_t pairs = (head_dim / config.share + 1) / 2;
  return std::min(head_dim, 2 * std::max<int64_t>(1, pairs));
}

absl::StatusOr<std::vector<ChannelLabels>> MakeChannelLabels(const ChannelConfig& config,
                                                             const AttentionShape& shape,
                                                             RowRange zone, const HostRows& rows,
                                                             ThreadPool* pool) {
  if (shape.head_dim % 2 != 0) {
    return absl::UnimplementedError(
        absl::StrCat("method=channels: head_dim=", shape.head_dim, " is odd"));
  }
  std::vector<ChannelLabels> labels(static_cast<size_t>(shape.layers) * shape.kv_heads);
  absl::Mutex mu;
  absl::Status failed;
  pool->ParallelFor(static_cast<int64_t>(labels.size()), [&](int64_t i) {
    const Layer layer(static_cast<int32_t>(i / shape.kv_heads));
    const KvHead head(static_cast<int32_t>(i % shape.kv_heads));
    absl::StatusOr<ChannelLabels> made =
        MakeLabels(config, rows, layer, head, zone, shape.head_dim);
    if (made.ok()) {
      labels[static_cast<size_t>(i)] = *std::move(made);
      return;
    }
    absl::MutexLock lock(&mu);
    failed.Update(Annotate(made.status(), "method=channels"));
  });
  RETURN_IF_ERROR(failed);
  return labels;
}

}  // namespace carrel::decoder
