#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/attention/prefill_attention/prefill_attention_variants.cuh"

namespace carrel::kernels {

bool PrefillAttentionHas(PrefillAttentionVariant variant, int32_t head_dim) {
  switch (variant) {
    case PrefillAttentionVariant::kWgmma:
      return PrefillAttentionWgmmaRuns(head_dim);
    case PrefillAttentionVariant::kMma:
    case PrefillAttentionVariant::kAuto:
      return head_dim == 16 || head_dim == 32 || head_dim == 64 || head_dim == 96 ||
             head_dim == 128;
  }
  return false;
}

cudaError_t PrefillAttentionCuda(const PrefillAttentionCudaParams& params, cudaStream_t stream,
                                 PrefillAttentionVariant variant) {
  if (params.n < 0 || params.rows < 0 || params.first_position < 0 || params.kv_heads < 1 ||
      params.q_heads % params.kv_heads != 0 || !PrefillAttentionHas(variant, params.head_dim)) {
    return cudaErrorInvalidValue;
  }
  if (params.n == 0 || params.q_heads == 0) return cudaSuccess;
  if (variant == PrefillAttentionVariant::kAuto) {
    // A tensor map cannot describe an empty tensor; few rows do not fill a tile of 128 either.
    const bool worthwhile = params.n >= 64 && params.rows >= 128;
    variant = worthwhile && PrefillAttentionWgmmaRuns(params.head_dim)
                  ? PrefillAttentionVariant::kWgmma
                  : PrefillAttentionVariant::kMma;
  }
  if (variant == PrefillAttentionVariant::kWgmma && params.rows > 0) {
    return PrefillAttentionWgmma(params, stream);
  }
  return PrefillAttentionMma(params, stream);
}

}  // namespace carrel::kernels
