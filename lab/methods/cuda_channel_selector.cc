#include "decoder/select/cuda_candidates.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/cuda_row_selector.h"
#include "kernels/of_heads.h"
#include "kernels/score/channel_score/channel_score.h"
#include "kernels/select/topk/topk_cuda.h"
#include "lab/methods/channel_labels.h"
#include "lab/methods/options.h"

namespace carrel::decoder {
namespace {

// Channels that a label has room for.
int64_t Width(const ChannelConfig& config, const CudaZoneShape& shape) {
  return ChannelsKept(config, shape.heads.head_dim) <= 16 ? 16 : 32;
}

// Every row of the zone gets a score, of which the best are taken, or are candidates.
class CudaChannelSelector final : public CudaRowSelector {
 public:
  CudaChannelSelector(const ChannelConfig& config, const CudaZoneShape& shape)
      : config_(config), shape_(shape), width_(Width(config, shape)) {}

  absl::Status Lay(int64_t oversample, const CudaKeys& keys, cuda::DeviceArena& arena) {
    const int64_t heads = shape_.heads.kv_heads;
    ASSIGN_OR_RETURN(candidates_, CudaCandidates::Lay("channels", shape_, oversample, keys, arena));
    scores_ = arena.Take<float>(heads * Stride());
    ids_ = arena.Take<int32_t>(heads * shape_.largest_budget());
    best_workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(kernels::TopKWorkspaceBytes(heads)));
    workspace_ = arena.Take<uint8_t>(
        static_cast<int64_t>(kernels::ChannelScoreWorkspaceBytes(heads, shape_.heads.group())));
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      const int64_t kept = shape_.dense(layer) ? 0 : heads;
      LayerState state;
      state.channels = arena.Take<int32_t>(kept * width_);
      state.least = arena.Take<float>(kept * width_);
      state.step = arena.Take<float>(kept * width_);
      state.labels = arena.Take<uint32_t>(kept * LabelWords());
      layers_.push_back(state);
    }
    return absl::OkStatus();
  }

  absl::Status Load(const CudaSelectorInput& input) override {
    RETURN_IF_ERROR(candidates_.Load());
    ASSIGN_OR_RETURN(
        const std::vector<ChannelLabels> labels,
        MakeChannelLabels(config_, shape_.heads, shape_.zone, *input.host_rows, input.pool));
    return LoadLabels(labels, input.pool);
  }

  bool attends(Layer layer) const override { return candidates_.rescores(layer); }
  void Add(const CudaChoice& choice, CudaChoices& to) const override {
    to.alone.emplace_back(this, choice);
    candidates_.AddKept(choice, ids_, to);
  }
  absl::Status Enqueue(const CudaChoice& choice, const cuda::Stream& stream) const override {
    const Layer layer = choice.layer;
    RETURN_IF_ERROR(Score(layer, choice.q, stream));
    kernels::TopKCudaParams best;
    best.scores = scores_;
    best.kv_heads = shape_.heads.kv_heads;
    best.n = shape_.zone.rows();
    best.score_stride = Stride();
    best.k = candidates_.Count(layer);
    best.ids = candidates_.Ids(layer, ids_);
    best.workspace = best_workspace_;
    RETURN_IF_CUDA_ERROR(kernels::TopKCuda(best, stream.get()));
    return absl::OkStatus();
  }
  CudaSelection selection(Layer layer) const override { return candidates_.selection(layer, ids_); }

 private:
  struct LayerState {
    int32_t* channels = nullptr;              // [kv_heads, width]
    float *least = nullptr, *step = nullptr;  // [kv_heads, width]
    uint32_t* labels = nullptr;               // PackChannelLabels of each KV head
  };

  // From one head's scores to the next's: the kernels' 16-byte accesses.
  int64_t Stride() const { return (shape_.zone.rows() + 3) / 4 * 4; }
  // Of a KV head.
  int64_t LabelWords() const {
    return kernels::ChannelLabelStride(shape_.zone.rows()) / 8 * width_;
  }

  // labels [layers, kv_heads]
  absl::Status LoadLabels(const std::vector<ChannelLabels>& labels, ThreadPool* pool) {
    const int64_t heads = shape_.heads.kv_heads, words = LabelWords();
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
      const LayerState& state = layers_[layer.value()];
      RETURN_IF_ERROR(CopyToDevice(state.channels, channels));
      RETURN_IF_ERROR(CopyToDevice(state.least, least));
      RETURN_IF_ERROR(CopyToDevice(state.step, step));
      RETURN_IF_ERROR(CopyToDevice(state.labels, packed));
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

  absl::Status Score(Layer layer, const uint16_t* q, const cuda::Stream& stream) const {
    const LayerState& state = layers_[layer.value()];
    auto params = kernels::OfHeads<kernels::ChannelScoreParams>(shape_.heads);
    params.q = q;
    params.channels = state.channels;
    params.least = state.least;
    params.step = state.step;
    params.labels = state.labels;
    params.width = width_;
    params.rows = shape_.zone.rows();
    params.label_stride = kernels::ChannelLabelStride(shape_.zone.rows());
    params.score_stride = Stride();
    params.scores = scores_;
    params.workspace = workspace_;
    RETURN_IF_CUDA_ERROR(kernels::ChannelScore(params, stream.get()));
    return absl::OkStatus();
  }

  const ChannelConfig config_;
  const CudaZoneShape shape_;
  const int64_t width_;
  std::vector<LayerState> layers_;
  CudaCandidates candidates_;
  float* scores_ = nullptr;  // [kv_heads, stride]: one for the q heads of a group
  int32_t* ids_ = nullptr;   // [kv_heads, most of any layer], of the layer in turn
  uint8_t *workspace_ = nullptr, *best_workspace_ = nullptr;
};

}  // namespace

CudaRowSelectorOr LayCudaChannels(const SelectorConfig& config, const CudaSelectorInput& input,
                                  cuda::DeviceArena& arena) {
  auto selector =
      std::make_unique<CudaChannelSelector>(OptionsOf<ChannelConfig>(config), input.shape);
  RETURN_IF_ERROR(selector->Lay(config.oversample, input.keys, arena));
  return selector;
}

}  // namespace carrel::decoder
