#include "decoder/refine/channel_refiner.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "common/dtype.h"
#include "common/status.h"
#include "decoder/refine/key_scores.h"

namespace carrel::decoder {
namespace {

constexpr int kLevels = 16;

struct Labels {
  std::vector<int64_t> channels;   // ascending
  std::vector<float> least, step;  // [channels]
  std::vector<uint8_t> bytes;      // [rows, channels / 2]: two channels a byte, the first one low
};

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

absl::StatusOr<Labels> MakeLabels(const ChannelConfig& config, const HostRows& rows, Layer layer,
                                  KvHead head, RowRange zone, int64_t d) {
  std::vector<float> keys(static_cast<size_t>(zone.rows() * d));
  for (Position row = zone.begin; row < zone.end; ++row) {
    WidenToFloat(DType::kBf16, rows.At(layer, head).Key(row), d,
                 &keys[static_cast<size_t>((row - zone.begin) * d)]);
  }
  ASSIGN_OR_RETURN(const std::vector<double> importance,
                   Importance(config.by, rows, layer, head, keys, d));
  Labels labels;
  const int64_t pairs = (d / config.share + 1) / 2;
  const int64_t count = std::min(d, 2 * std::max<int64_t>(1, pairs));
  labels.channels = BestIndices(std::vector<float>(importance.begin(), importance.end()), count);
  labels.bytes.assign(static_cast<size_t>(zone.rows() * count / 2), 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t c = labels.channels[static_cast<size_t>(i)];
    float low = INFINITY, high = -INFINITY;
    for (int64_t j = 0; j < zone.rows(); ++j) {
      low = std::min(low, keys[static_cast<size_t>(j * d + c)]);
      high = std::max(high, keys[static_cast<size_t>(j * d + c)]);
    }
    const float step = high > low ? (high - low) / (kLevels - 1) : 0;
    labels.least.push_back(low);
    labels.step.push_back(step);
    for (int64_t j = 0; step > 0 && j < zone.rows(); ++j) {
      const float level = (keys[static_cast<size_t>(j * d + c)] - low) / step;
      const auto nibble =
          static_cast<uint8_t>(std::clamp<long>(std::lround(level), 0, kLevels - 1));
      uint8_t& byte = labels.bytes[static_cast<size_t>(j * count / 2 + i / 2)];
      byte = static_cast<uint8_t>(byte | nibble << (i % 2 * 4));
    }
  }
  return labels;
}

class ChannelRefiner final : public Refiner {
 public:
  ChannelRefiner(const AttentionShape& shape, RowRange zone, std::vector<Labels> labels)
      : shape_(shape), zone_(zone), labels_(std::move(labels)) {}

  int64_t resident_bytes() const override {
    size_t bytes = 0;
    for (const Labels& labels : labels_) bytes += labels.bytes.size() + labels.channels.size() * 16;
    return static_cast<int64_t>(bytes);
  }

  void Select(const RefineRequest& request, Selection& selection) override {
    if (request.budget >= zone_.rows()) return AllRows(zone_, selection.rows);
    thread_local std::vector<float> scores, products;
    const Labels& labels = labels_[static_cast<size_t>(request.layer.value()) * shape_.kv_heads +
                                   request.head.value()];
    const int64_t n = zone_.rows(), pairs = static_cast<int64_t>(labels.channels.size()) / 2;
    scores.resize(static_cast<size_t>(request.queries * n));
    products.resize(static_cast<size_t>(pairs * 256));
    for (int64_t h = 0; h < request.queries; ++h) {
      MakeProducts(labels, request.q + h * shape_.head_dim, products.data());
      const uint8_t* bytes = labels.bytes.data();
      float* out = &scores[static_cast<size_t>(h * n)];
      for (int64_t j = 0; j < n; ++j, bytes += pairs) {
        float sum = 0;
        for (int64_t p = 0; p < pairs; ++p)
          sum += products[static_cast<size_t>(p * 256 + bytes[p])];
        out[j] = sum;
      }
    }
    selection.visited += n;
    selection.bytes_read += n * pairs;
    SelectByGroupScore(scores, request.queries, zone_, request.budget, selection.rows);
  }

 private:
  // [pairs, 256]: what each byte of a label adds to the score.
  void MakeProducts(const Labels& labels, const float* q, float* products) const {
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    for (size_t i = 0; i < labels.channels.size(); i += 2) {
      std::array<float, kLevels> of[2];
      for (size_t half = 0; half < 2; ++half) {
        const float weight = scale * q[labels.channels[i + half]];
        for (int level = 0; level < kLevels; ++level) {
          of[half][static_cast<size_t>(level)] =
              weight * (labels.least[i + half] + labels.step[i + half] * static_cast<float>(level));
        }
      }
      for (size_t byte = 0; byte < 256; ++byte) {
        products[i / 2 * 256 + byte] = of[0][byte % kLevels] + of[1][byte / kLevels];
      }
    }
  }

  const AttentionShape shape_;
  const RowRange zone_;
  const std::vector<Labels> labels_;  // [layers, kv_heads]
};

}  // namespace

absl::StatusOr<std::unique_ptr<Refiner>> MakeChannelRefiner(const ChannelConfig& config,
                                                            const AttentionShape& shape,
                                                            RowRange zone, const HostRows& rows,
                                                            ThreadPool* pool) {
  if (shape.head_dim % 2 != 0) {
    return absl::UnimplementedError(
        absl::StrCat("refine=channels: head_dim=", shape.head_dim, " is odd"));
  }
  std::vector<Labels> labels(static_cast<size_t>(shape.layers) * shape.kv_heads);
  absl::Mutex mu;
  absl::Status failed;
  pool->ParallelFor(static_cast<int64_t>(labels.size()), [&](int64_t i) {
    const Layer layer(static_cast<int32_t>(i / shape.kv_heads));
    const KvHead head(static_cast<int32_t>(i % shape.kv_heads));
    absl::StatusOr<Labels> made = MakeLabels(config, rows, layer, head, zone, shape.head_dim);
    if (made.ok()) {
      labels[static_cast<size_t>(i)] = *std::move(made);
      return;
    }
    absl::MutexLock lock(&mu);
    failed.Update(Annotate(made.status(), "refine=channels"));
  });
  RETURN_IF_ERROR(failed);
  return std::make_unique<ChannelRefiner>(shape, zone, std::move(labels));
}

}  // namespace carrel::decoder
