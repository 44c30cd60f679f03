#include <algorithm>

#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/attention/prefill_attention/prefill_attention_variants.cuh"

namespace carrel::kernels {

// Blocks for every multiprocessor of a large chip, and keys enough for each to be worth its join. Both are
// constants, so that bits do not depend on the chip.
int64_t PrefillAttentionParts(int64_t n, int64_t rows, int32_t q_heads) {
  constexpr int64_t kBlocks = 264, kQueries = 64, kLeastKeys = 256;
  if (n < 1 || q_heads < 1) return 1;
  const int64_t blocks = (n + kQueries - 1) / kQueries * q_heads;
  const int64_t parts = std::min((kBlocks + blocks - 1) / blocks, rows / kLeastKeys);
  return std::clamp<int64_t>(parts, 1, kMaxPrefillParts);
}

int64_t PrefillAttentionRoom(int64_t n, int64_t rows, int32_t q_heads, int32_t head_dim) {
  const int64_t parts = PrefillAttentionParts(n, rows, q_heads);
  return parts == 1 ? 0 : parts * n * q_heads * (head_dim + 1);
}

int64_t MostPrefillAttentionRoom(int64_t most, int32_t q_heads, int32_t head_dim) {
  int64_t floats = 0;
  for (int64_t n = 1; n <= most; ++n) {
    floats = std::max(floats, PrefillAttentionRoom(n, INT64_MAX, q_heads, head_dim));
  }
  return floats;
}

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
    // A tensor map cannot describe an empty tensor; few rows do not fill a tile of 128 either, and what is
    // cut into parts is kMma's.
    const bool parts =
        params.room != nullptr && PrefillAttentionParts(params.n, params.rows, params.q_heads) > 1;
    const bool worthwhile = params.n >= 64 && params.rows >= 128 && !parts;
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
