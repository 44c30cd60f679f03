#include "decoder/select/cuda_score_selector.h"

#include "decoder/select/cuda_methods.h"
#include "kernels/select/topk/topk_cuda.h"

namespace carrel::decoder {
// What the kernels' 16-byte accesses want.
int64_t CudaScoreSelector::Stride(const CudaZoneShape& shape) {
  return (shape.zone.rows() + 3) / 4 * 4;
}

int64_t CudaScoreSelector::Bytes(const CudaZoneShape& shape, int64_t oversample) {
  const int64_t heads = shape.heads.kv_heads;
  return heads * Stride(shape) * 4 + heads * shape.largest_budget() * 4 +
         CudaCandidates::Bytes(shape, oversample) +
         static_cast<int64_t>(kernels::TopKWorkspaceBytes(heads, 0));
}

absl::Status CudaScoreSelector::Allocate(const char* method, int64_t oversample,
                                         const CudaKeys& keys) {
  const int64_t heads = shape_.heads.kv_heads;
  ASSIGN_OR_RETURN(candidates_, CudaCandidates::Make(method, shape_, oversample, keys));
  ASSIGN_OR_RETURN(scores_, cuda::DeviceBuffer<float>::Create(heads * Stride(shape_)));
  ASSIGN_OR_RETURN(ids_, cuda::DeviceBuffer<int32_t>::Create(heads * shape_.largest_budget()));
  ASSIGN_OR_RETURN(workspace_, ZeroedDeviceBytes(kernels::TopKWorkspaceBytes(heads, 0)));
  return absl::OkStatus();
}

absl::Status CudaScoreSelector::Select(Layer layer, const uint16_t* q, int64_t,
                                       const cuda::Stream& stream) const {
  return Choose(layer, q, nullptr, stream);
}

absl::Status CudaScoreSelector::SelectAndAttend(Layer layer, const uint16_t* q, int64_t,
                                                const CudaAttendSelected& attend,
                                                const cuda::Stream& stream) const {
  return Choose(layer, q, &attend, stream);
}

absl::Status CudaScoreSelector::Choose(Layer layer, const uint16_t* q,
                                       const CudaAttendSelected* attend,
                                       const cuda::Stream& stream) const {
  RETURN_IF_ERROR(Score(layer, q, scores_.data(), Stride(shape_), stream));
  kernels::TopKCudaParams best;
  best.scores = scores_.data();
  best.kv_heads = shape_.heads.kv_heads;
  best.n = shape_.zone.rows();
  best.score_stride = Stride(shape_);
  best.k = candidates_.Count(layer);
  best.ids = candidates_.Ids(layer, ids_.data());
  best.workspace = workspace_.data();
  best.sorted = false;
  RETURN_IF_CUDA_ERROR(kernels::TopKCuda(best, stream.get()));
  return candidates_.Keep(layer, q, ids_.data(), attend, stream);
}

int64_t CudaScoreSelector::bytes() const {
  return scores_.bytes() + ids_.bytes() + candidates_.bytes() + workspace_.bytes();
}

CudaSelection CudaScoreSelector::selection(Layer layer) const {
  return candidates_.selection(layer, ids_.data());
}

}  // namespace carrel::decoder
