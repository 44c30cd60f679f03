#include "decoder/refine/cuda_score_refiner.h"

#include "absl/strings/str_cat.h"
#include "decoder/refine/cuda_methods.h"
#include "kernels/topk/topk_cuda.h"

namespace carrel::decoder {
// What the kernels' 16-byte accesses want.
int64_t CudaScoreRefiner::Stride(const CudaZoneShape& shape) {
  return (shape.zone.rows() + 3) / 4 * 4;
}

int64_t CudaScoreRefiner::Bytes(const CudaZoneShape& shape) {
  const int64_t heads = shape.heads.kv_heads, largest = shape.largest_budget();
  return heads * Stride(shape) * 4 + heads * largest * 8 +
         static_cast<int64_t>(kernels::TopKWorkspaceBytes(heads, largest));
}

absl::Status CudaScoreRefiner::Allocate(const char* method) {
  const int64_t heads = shape_.heads.kv_heads, largest = shape_.largest_budget();
  if (largest > kernels::kMaxTopKCuda) {
    return absl::InvalidArgumentError(absl::StrCat("refine=", method, ": a layer's budget of ",
                                                   largest, " rows exceeds ", kernels::kMaxTopKCuda,
                                                   " on a GPU; top_k=all attends to every row"));
  }
  ASSIGN_OR_RETURN(scores_, cuda::DeviceBuffer<float>::Create(heads * Stride(shape_)));
  ASSIGN_OR_RETURN(ids_, cuda::DeviceBuffer<int32_t>::Create(heads * largest));
  ASSIGN_OR_RETURN(best_, cuda::DeviceBuffer<float>::Create(heads * largest));
  ASSIGN_OR_RETURN(workspace_, ZeroedDeviceBytes(kernels::TopKWorkspaceBytes(heads, largest)));
  return absl::OkStatus();
}

absl::Status CudaScoreRefiner::Select(Layer layer, const uint16_t* q, int64_t,
                                      const cuda::Stream& stream) const {
  RETURN_IF_ERROR(Score(layer, q, scores_.data(), Stride(shape_), stream));
  kernels::TopKCudaParams best;
  best.scores = scores_.data();
  best.kv_heads = shape_.heads.kv_heads;
  best.n = shape_.zone.rows();
  best.score_stride = Stride(shape_);
  best.k = shape_.budgets[layer.value()];
  best.ids = ids_.data();
  best.out_scores = best_.data();
  best.workspace = workspace_.data();
  RETURN_IF_CUDA_ERROR(kernels::TopKCuda(best, stream.get()));
  return absl::OkStatus();
}

int64_t CudaScoreRefiner::bytes() const {
  return scores_.bytes() + ids_.bytes() + best_.bytes() + workspace_.bytes();
}

CudaSelection CudaScoreRefiner::selection(Layer layer) const {
  const int64_t budget = shape_.budgets[layer.value()];
  return {ids_.data(), budget, budget, nullptr};
}

}  // namespace carrel::decoder
