#include "absl/strings/str_cat.h"
#include "decoder/select/cuda_methods.h"
#include "kernels/select/hip_select/hip_select.h"

namespace carrel::decoder {
namespace {

class CudaHipSelector final : public CudaRowSelector {
 public:
  CudaHipSelector(const HipConfig& config, const CudaZoneShape& shape, const CudaKeys& keys)
      : config_(config), shape_(shape), keys_(keys) {}

  absl::Status Allocate() {
    const int32_t layers = shape_.heads.layers;
    ids_.resize(static_cast<size_t>(layers));
    for (Layer layer(0); layer.value() < layers; layer = layer.next()) {
      if (shape_.dense(layer)) continue;
      ASSIGN_OR_RETURN(ids_[layer.value()],
                       cuda::DeviceBuffer<int32_t>::Create(shape_.heads.kv_heads * budget(layer)));
    }
    ASSIGN_OR_RETURN(counts_,
                     cuda::DeviceBuffer<int32_t>::Create(int64_t{layers} * shape_.heads.kv_heads));
    ASSIGN_OR_RETURN(workspace_,
                     ZeroedDeviceBytes(kernels::HipSelectWorkspaceBytes(
                         shape_.heads.kv_heads, config_.block_k, shape_.largest_budget())));
    return absl::OkStatus();
  }

  int64_t bytes() const override {
    int64_t bytes = counts_.bytes() + workspace_.bytes();
    for (const auto& ids : ids_) bytes += ids.bytes();
    return bytes;
  }

  int64_t phases() const override { return config_.refresh > 1 ? 2 : 1; }
  int64_t PhaseOf(int64_t step) const override {
    return step > 0 && step % config_.refresh != 0 ? 1 : 0;
  }

  absl::Status Select(Layer layer, const uint16_t* q, int64_t phase,
                      const cuda::Stream& stream) const override {
    if (phase > 0) return absl::OkStatus();
    kernels::HipSelectParams params;
    params.q = q;
    params.kv = keys_.of(layer);
    params.kv_heads = shape_.heads.kv_heads;
    params.group = shape_.heads.group();
    params.head_dim = shape_.heads.head_dim;
    params.rows = shape_.zone.rows();
    params.block_k = config_.block_k;
    params.budget = params.ids_stride = budget(layer);
    params.ids = ids_[layer.value()].data();
    params.row_count = counts(layer);
    params.workspace = workspace_.data();
    RETURN_IF_CUDA_ERROR(kernels::HipSelect(params, stream.get()));
    return absl::OkStatus();
  }

  CudaSelection selection(Layer layer) const override {
    return {ids_[layer.value()].data(), budget(layer), budget(layer), counts(layer)};
  }

 private:
  int64_t budget(Layer layer) const { return shape_.budgets[layer.value()]; }
  int32_t* counts(Layer layer) const {
    return counts_.data() + layer.value() * shape_.heads.kv_heads;
  }

  const HipConfig config_;
  const CudaZoneShape shape_;
  const CudaKeys keys_;
  std::vector<cuda::DeviceBuffer<int32_t>> ids_;  // [layers]
  cuda::DeviceBuffer<int32_t> counts_;            // [layers, kv_heads]
  cuda::DeviceBuffer<uint8_t> workspace_;
};

int64_t CudaHipBytes(const HipConfig& config, const CudaZoneShape& shape) {
  int64_t bytes = int64_t{shape.heads.layers} * shape.heads.kv_heads * 4;
  for (Layer layer(0); layer.value() < shape.heads.layers; layer = layer.next()) {
    if (!shape.dense(layer)) bytes += shape.heads.kv_heads * shape.budgets[layer.value()] * 4;
  }
  return bytes + static_cast<int64_t>(kernels::HipSelectWorkspaceBytes(
                     shape.heads.kv_heads, config.block_k, shape.largest_budget()));
}

CudaRowSelectorOr MakeCudaHipSelector(const HipConfig& config, const CudaZoneShape& shape,
                                      const CudaKeys& keys) {
  if (const int64_t branches = shape.largest_budget() / config.block_k;
      branches > kernels::kMaxHipBranches) {
    return absl::InvalidArgumentError(
        absl::StrCat("method=hip: a layer's budget of ", shape.largest_budget(),
                     " rows with block_k=", config.block_k, " is ", branches,
                     " branches; a GPU keeps at most ", kernels::kMaxHipBranches));
  }
  auto selector = std::make_unique<CudaHipSelector>(config, shape, keys);
  RETURN_IF_ERROR(selector->Allocate());
  return selector;
}

}  // namespace

const CudaMethod& CudaHipMethod() {
  static constexpr CudaMethod method = {
      .bytes = [](const SelectorConfig& config, const CudaZoneShape& shape, const HostRows*)
          -> absl::StatusOr<int64_t> { return CudaHipBytes(config.hip, shape); },
      .make =
          [](const SelectorConfig& config, const CudaSelectorInput& input) {
            return MakeCudaHipSelector(config.hip, input.shape, input.keys);
          }};
  return method;
}

}  // namespace carrel::decoder
