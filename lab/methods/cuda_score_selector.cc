#include "lab/methods/cuda_score_selector.h"

#include "decoder/select/cuda_methods.h"
#include "decoder/select/cuda_row_selector.h"
#include "kernels/select/topk/topk_cuda.h"

namespace carrel::decoder {
// What the kernels' 16-byte accesses want.
int64_t CudaScoreSelector::Stride(const CudaZoneShape& shape) {
  return (shape.zone.rows() + 3) / 4 * 4;
}

absl::Status CudaScoreSelector::Lay(const char* method, int64_t oversample, const CudaKeys& keys,
                                    cuda::DeviceArena& arena) {
  const int64_t heads = shape_.heads.kv_heads;
  ASSIGN_OR_RETURN(candidates_, CudaCandidates::Lay(method, shape_, oversample, keys, arena));
  scores_ = arena.Take<float>(heads * Stride(shape_));
  ids_ = arena.Take<int32_t>(heads * shape_.largest_budget());
  workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(kernels::TopKWorkspaceBytes(heads, 0)));
  return absl::OkStatus();
}

void CudaScoreSelector::Add(const CudaChoice& choice, CudaChoices& to) const {
  to.alone.emplace_back(this, choice);
  candidates_.AddKept(choice, ids_, to);
}

absl::Status CudaScoreSelector::Enqueue(const CudaChoice& choice,
                                        const cuda::Stream& stream) const {
  const Layer layer = choice.layer;
  RETURN_IF_ERROR(Score(layer, choice.q, scores_, Stride(shape_), stream));
  kernels::TopKCudaParams best;
  best.scores = scores_;
  best.kv_heads = shape_.heads.kv_heads;
  best.n = shape_.zone.rows();
  best.score_stride = Stride(shape_);
  best.k = candidates_.Count(layer);
  best.ids = candidates_.Ids(layer, ids_);
  best.workspace = workspace_;
  best.sorted = false;
  RETURN_IF_CUDA_ERROR(kernels::TopKCuda(best, stream.get()));
  return absl::OkStatus();
}

CudaSelection CudaScoreSelector::selection(Layer layer) const {
  return candidates_.selection(layer, ids_);
}

}  // namespace carrel::decoder
