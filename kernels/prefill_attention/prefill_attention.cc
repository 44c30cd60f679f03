#include "kernels/prefill_attention/prefill_attention.h"
namespace carrel::kernels {

int64_t PrefillAttentionScratchFloats(int64_t head_dim) {
  return kPrefillQueryTile * (2 * head_dim + 512);
}

void PrefillAttention(const PrefillAttentionParams& params, float*) { RefPrefillAttention(params); }

}  // namespace carrel::kernels
