#include <cmath>

#include "decoder/refine/cuda_methods.h"
#include "decoder/refine/cuda_score_refiner.h"
#include "kernels/dot_score/dot_score_cuda.h"
#include "kernels/group_score/group_score_cuda.h"

namespace carrel::decoder {
namespace {

class CudaExactRefiner final : public CudaScoreRefiner {
 public:
  static int64_t Bytes(const CudaZoneShape& shape) {
    return CudaScoreRefiner::Bytes(shape, 1) + shape.heads.q_heads * (Stride(shape) + 1) * 4 +
           static_cast<int64_t>(
               kernels::GroupScoreWorkspaceBytes(shape.heads.kv_heads, shape.heads.group()));
  }

  static CudaRefinerOr Make(const CudaZoneShape& shape, const CudaKeys& keys) {
    std::unique_ptr<CudaExactRefiner> refiner(new CudaExactRefiner(shape, keys));
    RETURN_IF_ERROR(refiner->Allocate("exact", 1, keys));
    ASSIGN_OR_RETURN(refiner->of_q_heads_,
                     cuda::DeviceBuffer<float>::Create(shape.heads.q_heads * Stride(shape)));
    ASSIGN_OR_RETURN(refiner->base_, cuda::DeviceBuffer<float>::Create(shape.heads.q_heads));
    ASSIGN_OR_RETURN(refiner->workspace_, ZeroedDeviceBytes(kernels::GroupScoreWorkspaceBytes(
                                              shape.heads.kv_heads, shape.heads.group())));
    return refiner;
  }

  int64_t bytes() const override {
    return CudaScoreRefiner::bytes() + of_q_heads_.bytes() + base_.bytes() + workspace_.bytes();
  }

 private:
  CudaExactRefiner(const CudaZoneShape& shape, const CudaKeys& keys)
      : CudaScoreRefiner(shape), keys_(keys) {}

  absl::Status Score(Layer layer, const uint16_t* q, float* scores, int64_t stride,
                     const cuda::Stream& stream) const override {
    kernels::DotScoreCudaParams dot;
    dot.q = q;
    dot.k = keys_.layers[static_cast<size_t>(layer.value())];
    dot.kv_heads = shape_.heads.kv_heads;
    dot.group = shape_.heads.group();
    dot.head_dim = shape_.heads.head_dim;
    dot.rows = shape_.zone.rows();
    dot.row_stride = keys_.row_stride;
    dot.score_stride = stride;
    dot.scale = 1.0f / std::sqrt(static_cast<float>(shape_.heads.head_dim));
    dot.scores = of_q_heads_.data();
    RETURN_IF_CUDA_ERROR(kernels::DotScoreCuda(dot, stream.get()));
    kernels::GroupScoreCudaParams group;
    group.scores = of_q_heads_.data();
    group.kv_heads = shape_.heads.kv_heads;
    group.group = shape_.heads.group();
    group.n = shape_.zone.rows();
    group.score_stride = group.out_stride = stride;
    group.out = scores;
    group.base = base_.data();
    group.workspace = workspace_.data();
    RETURN_IF_CUDA_ERROR(kernels::GroupScoreCuda(group, stream.get()));
    return absl::OkStatus();
  }

  const float* base(Layer) const override { return base_.data(); }

  const CudaKeys keys_;
  cuda::DeviceBuffer<float> of_q_heads_;  // [q_heads, stride]
  cuda::DeviceBuffer<float> base_;        // [q_heads]
  cuda::DeviceBuffer<uint8_t> workspace_;
};

}  // namespace

int64_t CudaExactBytes(const CudaZoneShape& shape) { return CudaExactRefiner::Bytes(shape); }

CudaRefinerOr MakeCudaExactRefiner(const CudaZoneShape& shape, const CudaKeys& keys) {
  return CudaExactRefiner::Make(shape, keys);
}

}  // namespace carrel::decoder
