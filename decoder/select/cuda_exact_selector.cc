#include "decoder/select/cuda_methods.h"
#include "kernels/of_heads.h"
#include "kernels/score/dot_score/dot_score_cuda.h"
#include "kernels/select/group_topk/group_topk.h"

namespace carrel::decoder {
namespace {

// Scores of one q head lie so far apart: the kernels' 16-byte accesses.
int64_t Stride(const CudaZoneShape& shape) { return (shape.zone.rows() + 3) / 4 * 4; }

// The kernel's params that size its workspace.
kernels::GroupTopKParams SelectionOf(const CudaZoneShape& shape) {
  auto params = kernels::OfHeads<kernels::GroupTopKParams>(shape.heads);
  params.n = shape.zone.rows();
  params.score_stride = Stride(shape);
  params.parts = kernels::DotScoreParts(shape.heads.kv_heads, shape.zone.rows());
  return params;
}

// Scores of every q head with every row, then the best of each group.
class CudaExactSelector final : public CudaRowSelector {
 public:
  CudaExactSelector(const CudaSelectorInput& input, cuda::DeviceArena& arena)
      : shape_(input.shape),
        keys_(input.keys),
        scores_(arena.Take<float>(shape_.heads.q_heads * Stride(shape_))),
        states_(arena.Take<float>(2 * shape_.heads.q_heads * SelectionOf(shape_).parts)),
        base_(arena.Take<float>(shape_.heads.q_heads)),
        ids_(arena.Take<int32_t>(shape_.heads.kv_heads * shape_.largest_budget())),
        workspace_(arena.Take<uint8_t>(
            static_cast<int64_t>(kernels::GroupTopKWorkspaceBytes(SelectionOf(shape_))))),
        head_budgets_(shape_, arena) {}

  absl::Status Load(const CudaSelectorInput&) override { return head_budgets_.Load(); }

  absl::Status Enqueue(const CudaChoice& choice, const cuda::Stream& stream) const override {
    const Layer layer = choice.layer;
    kernels::GroupTopKParams best = SelectionOf(shape_);
    auto dot = kernels::OfHeads<kernels::DotScoreCudaParams>(shape_.heads);
    dot.q = choice.q;
    dot.kv = keys_.of(layer);
    dot.rows = shape_.zone.rows();
    dot.score_stride = best.score_stride;
    dot.scores = scores_;
    dot.states = states_;
    RETURN_IF_CUDA_ERROR(kernels::DotScoreCuda(dot, stream.get()));
    best.scores = scores_;
    best.states = states_;
    best.k = shape_.budgets[layer.value()];
    best.k_of_head = head_budgets_.of(layer);
    best.ids = ids_;
    best.base = base_;
    best.workspace = workspace_;
    RETURN_IF_CUDA_ERROR(kernels::GroupTopK(best, stream.get()));
    return absl::OkStatus();
  }

  CudaSelection selection(Layer layer) const override {
    const int64_t budget = shape_.budgets[layer.value()];
    return {ids_, budget, budget, head_budgets_.of(layer), base_, head_budgets_.total(layer)};
  }

 private:
  const CudaZoneShape shape_;
  const CudaKeys keys_;
  float* const scores_;  // [q_heads, stride], of the layer in turn; so are the others
  float* const states_;  // of the scores' parts
  float* const base_;    // [q_heads]
  int32_t* const ids_;   // [kv_heads, most of any layer]
  uint8_t* const workspace_;
  CudaHeadBudgets head_budgets_;
};

}  // namespace

CudaRowSelectorOr LayCudaExact(const SelectorConfig&, const CudaSelectorInput& input,
                               cuda::DeviceArena& arena) {
  return std::make_unique<CudaExactSelector>(input, arena);
}

}  // namespace carrel::decoder
