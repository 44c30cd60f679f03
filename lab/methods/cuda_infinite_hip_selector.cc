#include <algorithm>

#include "decoder/select/cuda_methods.h"
#include "kernels/of_heads.h"
#include "kernels/select/infinitehip_stage/infinitehip_stage.h"
#include "lab/methods/infinite_hip_selector.h"
#include "lab/methods/options.h"

namespace carrel::decoder {
namespace {

// A stage that prunes a layer; those whose candidates are few enough already do nothing.
struct Stage {
  int64_t number = 0;  // in the config
  int64_t chunk = 0, wanted = 0;
  // Of its candidates; 0 for the first stage, which has the whole zone.
  int64_t in_ranges = 0, longest = 0;
  int64_t out_ranges = 0;
};

kernels::InfiniteHipStageParams ParamsOf(const CudaZoneShape& shape, const Stage& stage) {
  auto params = kernels::OfHeads<kernels::InfiniteHipStageParams>(shape.heads);
  params.rows = shape.zone.rows();
  params.in_stride = stage.in_ranges;
  params.in_rows = stage.longest;
  params.chunk = stage.chunk;
  params.wanted = stage.wanted;
  params.out_stride = stage.out_ranges;
  return params;
}

// Stands where a launch will have the ranges of the stage before.
constexpr kernels::InfiniteHipRange kSomeRange = {0, 0};

std::vector<Stage> PlanLayer(const InfiniteHipConfig& config, const CudaZoneShape& shape,
                             int64_t budget) {
  std::vector<Stage> plan;
  // Of what has come through so far, at most and at least.
  int64_t most_rows = shape.zone.rows(), least_rows = most_rows, longest = 0;
  bool only_last_is_short = true;
  for (size_t i = 0; i < config.stages.size(); ++i) {
    const InfiniteHipStage& from = config.stages[i];
    Stage stage;
    stage.number = static_cast<int64_t>(i);
    stage.wanted = from.Wanted(budget);
    if (most_rows <= stage.wanted) continue;
    stage.chunk = from.chunk;
    while (stage.chunk > stage.wanted) stage.chunk /= 2;
    if (!plan.empty()) {
      stage.in_ranges = plan.back().out_ranges;
      stage.longest = longest;
    }
    kernels::InfiniteHipStageParams params = ParamsOf(shape, stage);
    params.in = plan.empty() ? nullptr : &kSomeRange;
    stage.out_ranges = kernels::InfiniteHipMostRanges(params);
    const int64_t kept = stage.wanted / stage.chunk;
    const bool as_they_are = least_rows <= stage.wanted;  // may go on so
    only_last_is_short =
        only_last_is_short && !as_they_are && (plan.empty() || longest % stage.chunk == 0);
    most_rows = as_they_are ? stage.wanted : kept * stage.chunk;
    least_rows = only_last_is_short ? (kept - 1) * stage.chunk + 1 : std::min(kept, least_rows);
    longest = as_they_are ? std::max(longest, stage.chunk) : stage.chunk;
    plan.push_back(stage);
  }
  return plan;
}

struct LayerBuffers {
  // [stages that prune]: ranges [kv_heads, out_ranges], and how many [kv_heads].
  std::vector<kernels::InfiniteHipRange*> ranges;
  std::vector<int32_t*> counts;
  int32_t *ids = nullptr, *row_count = nullptr;  // of the last
};

class CudaInfiniteHipSelector final : public CudaRowSelector {
 public:
  CudaInfiniteHipSelector(const InfiniteHipConfig& config, const CudaSelectorInput& input,
                          cuda::DeviceArena& arena)
      : config_(config), shape_(input.shape), keys_(input.keys) {
    const int64_t heads = shape_.heads.kv_heads;
    size_t workspace_bytes = 0;
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      LayerBuffers& buffers = buffers_.emplace_back();
      std::vector<Stage>& plan = plans_.emplace_back();
      if (shape_.dense(layer)) continue;
      plan = PlanLayer(config_, shape_, shape_.budgets[layer.value()]);
      for (size_t i = 0; i < plan.size(); ++i) {
        kernels::InfiniteHipStageParams params = ParamsOf(shape_, plan[i]);
        params.in = i == 0 ? nullptr : &kSomeRange;
        workspace_bytes =
            std::max(workspace_bytes, kernels::InfiniteHipStageWorkspaceBytes(params));
        buffers.ranges.push_back(arena.Take<kernels::InfiniteHipRange>(heads * plan[i].out_ranges));
        buffers.counts.push_back(arena.Take<int32_t>(heads));
      }
      buffers.ids = arena.Take<int32_t>(heads * plan.back().wanted);
      buffers.row_count = arena.Take<int32_t>(heads);
    }
    workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(workspace_bytes));
  }

  absl::Status Load(const CudaSelectorInput&) override { return absl::OkStatus(); }

  // Phase p evaluates the stages from p on.
  int64_t phases() const override { return static_cast<int64_t>(config_.stages.size()) + 1; }
  int64_t PhaseOf(int64_t step) const override {
    if (step <= 0) return 0;
    int64_t phase = 0;
    for (const InfiniteHipStage& stage : config_.stages) {
      if (step % stage.refresh == 0) break;
      ++phase;
    }
    return phase;
  }

  absl::Status Enqueue(const CudaChoice& choice, const cuda::Stream& stream) const override {
    const Layer layer = choice.layer;
    const std::vector<Stage>& plan = plans_[layer.value()];
    const LayerBuffers& buffers = buffers_[layer.value()];
    for (size_t i = 0; i < plan.size(); ++i) {
      if (plan[i].number < choice.phase) continue;
      kernels::InfiniteHipStageParams params = ParamsOf(shape_, plan[i]);
      params.q = choice.q;
      params.kv = keys_.of(layer);
      if (i > 0) {
        params.in = buffers.ranges[i - 1];
        params.in_count = buffers.counts[i - 1];
      }
      params.out = buffers.ranges[i];
      params.out_count = buffers.counts[i];
      if (i + 1 == plan.size()) {
        params.ids = buffers.ids;
        params.ids_stride = plan[i].wanted;
        params.row_count = buffers.row_count;
      }
      params.workspace = workspace_;
      RETURN_IF_CUDA_ERROR(kernels::InfiniteHipStage(params, stream.get()));
    }
    return absl::OkStatus();
  }

  CudaSelection selection(Layer layer) const override {
    const LayerBuffers& buffers = buffers_[layer.value()];
    const int64_t wanted = plans_[layer.value()].back().wanted;
    return {buffers.ids, wanted, std::min(wanted, shape_.budgets[layer.value()]),
            buffers.row_count};
  }

 private:
  const InfiniteHipConfig config_;
  const CudaZoneShape shape_;
  const CudaKeys keys_;
  std::vector<std::vector<Stage>> plans_;  // [layers]
  std::vector<LayerBuffers> buffers_;      // [layers]
  uint8_t* workspace_ = nullptr;
};

}  // namespace

CudaRowSelectorOr LayCudaInfiniteHip(const SelectorConfig& config, const CudaSelectorInput& input,
                                     cuda::DeviceArena& arena) {
  return std::make_unique<CudaInfiniteHipSelector>(OptionsOf<InfiniteHipConfig>(config), input,
                                                   arena);
}

}  // namespace carrel::decoder
