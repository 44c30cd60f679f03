#include <cmath>

#include "decoder/select/cuda_head_budgets.h"
#include "decoder/select/cuda_methods.h"
#include "kernels/score/dot_score/dot_score_cuda.h"
#include "kernels/select/group_topk/group_topk.h"

namespace carrel::decoder {
namespace {

// Scores of one q head lie so far apart: the kernels' 16-byte accesses.
int64_t Stride(const CudaZoneShape& shape) { return (shape.zone.rows() + 3) / 4 * 4; }

// The kernel's params that size its workspace.
kernels::GroupTopKParams SelectionOf(const CudaZoneShape& shape) {
  kernels::GroupTopKParams params;
  params.kv_heads = shape.heads.kv_heads;
  params.group = shape.heads.group();
  params.n = shape.zone.rows();
  params.score_stride = Stride(shape);
  params.parts = kernels::DotScoreParts(shape.heads.kv_heads, shape.zone.rows());
  return params;
}

int64_t StateFloats(const CudaZoneShape& shape) {
  return 2 * shape.heads.q_heads * SelectionOf(shape).parts;
}

// Scores of every q head with every row, then the best of each group.
class CudaExactSelector final : public CudaRowSelector {
 public:
  static int64_t Bytes(const CudaZoneShape& shape) {
    const int64_t floats = shape.heads.q_heads * (Stride(shape) + 1) + StateFloats(shape);
    return 4 * (floats + shape.heads.kv_heads * shape.largest_budget()) +
           static_cast<int64_t>(kernels::GroupTopKWorkspaceBytes(SelectionOf(shape))) +
           CudaHeadBudgets::Bytes(shape);
  }

  static CudaRowSelectorOr Make(const CudaZoneShape& shape, const CudaKeys& keys) {
    std::unique_ptr<CudaExactSelector> selector(new CudaExactSelector(shape, keys));
    RETURN_IF_ERROR(selector->Allocate());
    return selector;
  }

  absl::Status Select(Layer layer, const uint16_t* q, int64_t,
                      const cuda::Stream& stream) const override {
    kernels::GroupTopKParams best = SelectionOf(shape_);
    kernels::DotScoreCudaParams dot;
    dot.q = q;
    dot.kv = keys_.of(layer);
    dot.kv_heads = shape_.heads.kv_heads;
    dot.group = shape_.heads.group();
    dot.head_dim = shape_.heads.head_dim;
    dot.rows = shape_.zone.rows();
    dot.score_stride = best.score_stride;
    dot.scale = 1.0f / std::sqrt(static_cast<float>(shape_.heads.head_dim));
    dot.scores = scores_.data();
    dot.states = states_.data();
    RETURN_IF_CUDA_ERROR(kernels::DotScoreCuda(dot, stream.get()));
    best.scores = scores_.data();
    best.states = states_.data();
    best.k = shape_.budgets[layer.value()];
    best.k_of_head = head_budgets_.of(layer);
    best.ids = ids_.data();
    best.base = base_.data();
    best.workspace = workspace_.data();
    RETURN_IF_CUDA_ERROR(kernels::GroupTopK(best, stream.get()));
    return absl::OkStatus();
  }

  CudaSelection selection(Layer layer) const override {
    const int64_t budget = shape_.budgets[layer.value()];
    return {ids_.data(),  budget,
            budget,       head_budgets_.of(layer),
            base_.data(), head_budgets_.total(layer)};
  }

  int64_t bytes() const override {
    return scores_.bytes() + states_.bytes() + base_.bytes() + ids_.bytes() + workspace_.bytes() +
           head_budgets_.bytes();
  }

 private:
  CudaExactSelector(const CudaZoneShape& shape, const CudaKeys& keys)
      : shape_(shape), keys_(keys) {}

  absl::Status Allocate() {
    ASSIGN_OR_RETURN(scores_,
                     cuda::DeviceBuffer<float>::Create(shape_.heads.q_heads * Stride(shape_)));
    ASSIGN_OR_RETURN(states_, cuda::DeviceBuffer<float>::Create(StateFloats(shape_)));
    ASSIGN_OR_RETURN(base_, cuda::DeviceBuffer<float>::Create(shape_.heads.q_heads));
    ASSIGN_OR_RETURN(
        ids_, cuda::DeviceBuffer<int32_t>::Create(shape_.heads.kv_heads * shape_.largest_budget()));
    ASSIGN_OR_RETURN(workspace_,
                     ZeroedDeviceBytes(kernels::GroupTopKWorkspaceBytes(SelectionOf(shape_))));
    ASSIGN_OR_RETURN(head_budgets_, CudaHeadBudgets::Make(shape_));
    return absl::OkStatus();
  }

  const CudaZoneShape shape_;
  const CudaKeys keys_;
  cuda::DeviceBuffer<float> scores_;  // [q_heads, stride], of the layer in turn; so are the others
  cuda::DeviceBuffer<float> states_;  // of the scores' parts
  cuda::DeviceBuffer<float> base_;    // [q_heads]
  cuda::DeviceBuffer<int32_t> ids_;   // [kv_heads, most of any layer]
  cuda::DeviceBuffer<uint8_t> workspace_;
  CudaHeadBudgets head_budgets_;
};

CudaRowSelectorOr MakeCudaExactSelector(const CudaZoneShape& shape, const CudaKeys& keys) {
  return CudaExactSelector::Make(shape, keys);
}

}  // namespace

const CudaMethod& CudaExactMethod() {
  static constexpr CudaMethod method = {
      .bytes = [](const SelectorConfig&, const CudaZoneShape& shape, const HostRows*)
          -> absl::StatusOr<int64_t> { return CudaExactSelector::Bytes(shape); },
      .make =
          [](const SelectorConfig&, const CudaSelectorInput& input) {
            return MakeCudaExactSelector(input.shape, input.keys);
          }};
  return method;
}

}  // namespace carrel::decoder
