// What:   prefill_attention on AMX's tiles, over rows that were packed by PackPrefillRows. Called by
//         prefill_attention.cc alone.
#pragma once

#include "kernels/attention/prefill_attention/prefill_attention.h"

namespace carrel::kernels {

int64_t PrefillAttentionInPartsScratchFloats(int64_t head_dim, int64_t heads);
// params.packed is set, scratch on a cache line.
void PrefillAttentionInParts(const PrefillAttentionParams& params, float* scratch);

}  // namespace carrel::kernels
