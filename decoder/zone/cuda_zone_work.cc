#include "decoder/zone/cuda_zone_work.h"

#include <cmath>

#include "common/cuda/status.h"
#include "common/status.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"

namespace carrel::decoder {

absl::Status CudaZoneWork::Launch(const cuda::Stream& stream) const {
  RETURN_IF_ERROR(choices.Launch(stream));
  for (const cuda::Event* const event : fetched) RETURN_IF_ERROR(stream.WaitFor(*event));
  RETURN_IF_CUDA_ERROR(kernels::UseRowBanks(banks, stream.get()));
  RETURN_IF_CUDA_ERROR(kernels::GatherPackedRowsCuda(gathers, stream.get()));
  RETURN_IF_CUDA_ERROR(kernels::SparseAttentionCuda(to_chosen, stream.get()));
  RETURN_IF_CUDA_ERROR(kernels::WindowAttentionCuda(to_all, stream.get()));
  for (const kernels::SummaryAttentionCudaParams& one : to_rest) {
    RETURN_IF_CUDA_ERROR(kernels::AttendSummariesCuda(one, stream.get()));
  }
  return absl::OkStatus();
}

absl::Status AttendBlock(const AttentionShape& heads, const CudaQueries& queries,
                         const kernels::KvView& kv, int64_t first, int64_t rows,
                         const CudaPartial& to, const cuda::Stream& stream) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(heads.head_dim));
  const kernels::PrefillAttentionCudaParams params = {.q = queries.rounded,
                                                      .kv = kv,
                                                      .n = queries.n,
                                                      .first_position = first,
                                                      .rows = rows,
                                                      .q_heads = heads.q_heads,
                                                      .kv_heads = heads.kv_heads,
                                                      .head_dim = heads.head_dim,
                                                      .scale = scale,
                                                      .out_exact = to.out,
                                                      .lse = to.lse,
                                                      .room = queries.room};
  RETURN_IF_CUDA_ERROR(kernels::PrefillAttentionCuda(params, stream.get()));
  return absl::OkStatus();
}

}  // namespace carrel::decoder
