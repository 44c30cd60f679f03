// What: the variants behind PrefillAttentionCuda; params are checked, n and q_heads are positive.
#pragma once

#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"

namespace carrel::kernels {

cudaError_t PrefillAttentionMma(const PrefillAttentionCudaParams& params, cudaStream_t stream);
cudaError_t PrefillAttentionWgmma(const PrefillAttentionCudaParams& params, cudaStream_t stream);
bool PrefillAttentionWgmmaRuns(int32_t head_dim);  // on the current device

}  // namespace carrel::kernels
