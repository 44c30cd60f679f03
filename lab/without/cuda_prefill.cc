// In place of the GPU's half of lab/prefill.
#include "common/lab.h"
#include "prefill/cuda_sparse_attention.h"

namespace carrel::prefill {

absl::Status CudaSparseAttention::Check(const AttentionConfig& config, const AttentionShape&) {
  return CheckLab(AttentionText(config));
}

int64_t CudaSparseAttention::Bytes(const AttentionConfig&, const model::ModelConfig&, int64_t,
                                   int64_t) {
  return 0;
}

absl::StatusOr<std::unique_ptr<CudaSparseAttention>> CudaSparseAttention::Create(
    const AttentionConfig& config, const model::ModelConfig& model, int64_t, int64_t) {
  return Check(config, model.shape);
}

}  // namespace carrel::prefill
