#include <cmath>

#include "decoder/select/channel_labels.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/cuda_score_selector.h"
#include "kernels/score/channel_score/channel_score.h"

namespace carrel::decoder {
namespace {

// Channels that a label has room for.
int64_t Width(const ChannelConfig& config, const CudaZoneShape& shape) {
  return ChannelsKept(config, shape.heads.head_dim) <= 16 ? 16 : 32;
}

// Of all KV heads of a layer.
int64_t LabelWords(const CudaZoneShape& shape, int64_t width) {
  return shape.heads.kv_heads * kernels::ChannelLabelStride(shape.zone.rows()) / 8 * width;
}

class CudaChannelSelector final : public CudaScoreSelector {
 public:
  static CudaRowSelectorOr Make(const ChannelConfig& config, const CudaZoneShape& shape,
                                const CudaKeys& keys, const HostRows& host_rows, ThreadPool* pool) {
    std::unique_ptr<CudaChannelSelector> selector(
        new CudaChannelSelector(shape, Width(config, shape)));
    RETURN_IF_ERROR(selector->Allocate("channels", config.oversample, keys));
    ASSIGN_OR_RETURN(selector->workspace_, ZeroedDeviceBytes(kernels::ChannelScoreWorkspaceBytes(
                                               shape.heads.kv_heads, shape.heads.group())));
    ASSIGN_OR_RETURN(const std::vector<ChannelLabels> labels,
                     MakeChannelLabels(config, shape.heads, shape.zone, host_rows, pool));
    RETURN_IF_ERROR(selector->Load(labels, pool));
    return selector;
  }

  int64_t bytes() const override {
    int64_t bytes = CudaScoreSelector::bytes() + workspace_.bytes();
    for (const LayerState& layer : layers_) {
      bytes +=
          layer.channels.bytes() + layer.least.bytes() + layer.step.bytes() + layer.labels.bytes();
    }
    return bytes;
  }

 private:
  struct LayerState {
    cuda::DeviceBuffer<int32_t> channels;   // [kv_heads, width]
    cuda::DeviceBuffer<float> least, step;  // [kv_heads, width]
    cuda::DeviceBuffer<uint32_t> labels;    // PackChannelLabels of each KV head
  };

  CudaChannelSelector(const CudaZoneShape& shape, int64_t width)
      : CudaScoreSelector(shape), width_(width), layers_(static_cast<size_t>(shape.heads.layers)) {}

  // labels [layers, kv_heads]
  absl::Status Load(const std::vector<ChannelLabels>& labels, ThreadPool* pool) {
    const int64_t heads = shape_.heads.kv_heads, words = LabelWords(shape_, width_) / heads;
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      if (shape_.dense(layer)) continue;
      // Room beyond the channels stays without weight.
      std::vector<int32_t> channels(static_cast<size_t>(heads * width_));
      std::vector<float> least(channels.size()), step(channels.size());
      std::vector<uint32_t> packed(static_cast<size_t>(heads * words));
      pool->ParallelFor(heads, [&](int64_t head) {
        const ChannelLabels& of_head = labels[static_cast<size_t>(layer.value() * heads + head)];
        const auto at = static_cast<std::ptrdiff_t>(head * width_);
        std::copy(of_head.channels.begin(), of_head.channels.end(), channels.begin() + at);
        std::copy(of_head.least.begin(), of_head.least.end(), least.begin() + at);
        std::copy(of_head.step.begin(), of_head.step.end(), step.begin() + at);
        kernels::PackChannelLabels(Levels(of_head).data(), shape_.zone.rows(), width_,
                                   packed.data() + head * words);
      });
      LayerState& state = layers_[layer.value()];
      ASSIGN_OR_RETURN(state.channels, ToDevice(channels));
      ASSIGN_OR_RETURN(state.least, ToDevice(least));
      ASSIGN_OR_RETURN(state.step, ToDevice(step));
      ASSIGN_OR_RETURN(state.labels, ToDevice(packed));
    }
    return absl::OkStatus();
  }

  // [rows, width]
  std::vector<uint8_t> Levels(const ChannelLabels& labels) const {
    const auto pairs = static_cast<int64_t>(labels.channels.size()) / 2;
    std::vector<uint8_t> levels(static_cast<size_t>(shape_.zone.rows() * width_));
    for (int64_t j = 0; j < shape_.zone.rows(); ++j) {
      for (int64_t i = 0; i < pairs; ++i) {
        const uint8_t byte = labels.bytes[static_cast<size_t>(j * pairs + i)];
        levels[static_cast<size_t>(j * width_ + 2 * i)] = byte % kChannelLevels;
        levels[static_cast<size_t>(j * width_ + 2 * i + 1)] = byte / kChannelLevels;
      }
    }
    return levels;
  }

  absl::Status Score(Layer layer, const uint16_t* q, float* scores, int64_t stride,
                     const cuda::Stream& stream) const override {
    const LayerState& state = layers_[layer.value()];
    kernels::ChannelScoreParams params;
    params.q = q;
    params.channels = state.channels.data();
    params.least = state.least.data();
    params.step = state.step.data();
    params.labels = state.labels.data();
    params.kv_heads = shape_.heads.kv_heads;
    params.group = shape_.heads.group();
    params.head_dim = shape_.heads.head_dim;
    params.width = width_;
    params.rows = shape_.zone.rows();
    params.label_stride = kernels::ChannelLabelStride(shape_.zone.rows());
    params.score_stride = stride;
    params.scale = 1.0f / std::sqrt(static_cast<float>(shape_.heads.head_dim));
    params.scores = scores;
    params.workspace = workspace_.data();
    RETURN_IF_CUDA_ERROR(kernels::ChannelScore(params, stream.get()));
    return absl::OkStatus();
  }

  const int64_t width_;
  std::vector<LayerState> layers_;
  cuda::DeviceBuffer<uint8_t> workspace_;
};

int64_t CudaChannelBytes(const ChannelConfig& config, const CudaZoneShape& shape) {
  const int64_t width = Width(config, shape);
  int64_t bytes = CudaScoreSelector::Bytes(shape, config.oversample) +
                  static_cast<int64_t>(kernels::ChannelScoreWorkspaceBytes(shape.heads.kv_heads,
                                                                           shape.heads.group()));
  for (Layer layer(0); layer.value() < shape.heads.layers; layer = layer.next()) {
    if (!shape.dense(layer)) {
      bytes += LabelWords(shape, width) * 4 + shape.heads.kv_heads * width * 12;
    }
  }
  return bytes;
}

CudaRowSelectorOr MakeCudaChannelSelector(const ChannelConfig& config, const CudaZoneShape& shape,
                                          const CudaKeys& keys, const HostRows& host_rows,
                                          ThreadPool* pool) {
  return CudaChannelSelector::Make(config, shape, keys, host_rows, pool);
}

}  // namespace

const CudaMethod& CudaChannelsMethod() {
  static constexpr CudaMethod method = {
      .bytes = [](const SelectorConfig& config, const CudaZoneShape& shape, const HostRows*)
          -> absl::StatusOr<int64_t> { return CudaChannelBytes(config.channels, shape); },
      .make =
          [](const SelectorConfig& config, const CudaSelectorInput& input) {
            return MakeCudaChannelSelector(config.channels, input.shape, input.keys,
                                           *input.host_rows, input.pool);
          }};
  return method;
}

}  // namespace carrel::decoder
