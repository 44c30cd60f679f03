#include "absl/strings/str_cat.h"
#include "decoder/select/cuda_methods.h"
#include "kernels/of_heads.h"
#include "kernels/select/hip_select/hip_select.h"
#include "lab/methods/hip_selector.h"
#include "lab/methods/options.h"

namespace carrel::decoder {
namespace {

class CudaHipSelector final : public CudaRowSelector {
 public:
  CudaHipSelector(const HipConfig& config, const CudaSelectorInput& input, cuda::DeviceArena& arena)
      : config_(config),
        shape_(input.shape),
        keys_(input.keys),
        counts_(arena.Take<int32_t>(int64_t{shape_.heads.layers} * shape_.heads.kv_heads)),
        workspace_(arena.Take<uint8_t>(static_cast<int64_t>(kernels::HipSelectWorkspaceBytes(
            shape_.heads.kv_heads, config.block_k, shape_.largest_budget())))) {
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      const int64_t rows = shape_.dense(layer) ? 0 : budget(layer);
      ids_.push_back(arena.Take<int32_t>(shape_.heads.kv_heads * rows));
    }
  }

  absl::Status Load(const CudaSelectorInput&) override { return absl::OkStatus(); }

  int64_t phases() const override { return config_.refresh > 1 ? 2 : 1; }
  int64_t PhaseOf(int64_t step) const override {
    return step > 0 && step % config_.refresh != 0 ? 1 : 0;
  }

  absl::Status Enqueue(const CudaChoice& choice, const cuda::Stream& stream) const override {
    const Layer layer = choice.layer;
    if (choice.phase > 0) return absl::OkStatus();
    auto params = kernels::OfHeads<kernels::HipSelectParams>(shape_.heads);
    params.q = choice.q;
    params.kv = keys_.of(layer);
    params.rows = shape_.zone.rows();
    params.block_k = config_.block_k;
    params.budget = params.ids_stride = budget(layer);
    params.ids = ids_[layer.value()];
    params.row_count = counts(layer);
    params.workspace = workspace_;
    RETURN_IF_CUDA_ERROR(kernels::HipSelect(params, stream.get()));
    return absl::OkStatus();
  }

  CudaSelection selection(Layer layer) const override {
    return {ids_[layer.value()], budget(layer), budget(layer), counts(layer)};
  }

 private:
  int64_t budget(Layer layer) const { return shape_.budgets[layer.value()]; }
  int32_t* counts(Layer layer) const { return counts_ + layer.value() * shape_.heads.kv_heads; }

  const HipConfig config_;
  const CudaZoneShape shape_;
  const CudaKeys keys_;
  std::vector<int32_t*> ids_;  // [layers]
  int32_t* const counts_;      // [layers, kv_heads]
  uint8_t* const workspace_;
};

}  // namespace

CudaRowSelectorOr LayCudaHip(const SelectorConfig& config, const CudaSelectorInput& input,
                             cuda::DeviceArena& arena) {
  const auto hip = OptionsOf<HipConfig>(config);
  const int64_t budget = input.shape.largest_budget();
  if (const int64_t branches = budget / hip.block_k; branches > kernels::kMaxHipBranches) {
    return absl::InvalidArgumentError(absl::StrCat(
        "method=hip: a layer's budget of ", budget, " rows with block_k=", hip.block_k, " is ",
        branches, " branches; a GPU keeps at most ", kernels::kMaxHipBranches));
  }
  return std::make_unique<CudaHipSelector>(hip, input, arena);
}

}  // namespace carrel::decoder
