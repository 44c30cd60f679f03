// What:   greedy sampling on the GPU: the token with the largest logit.
// Math:   id[i] = the least j with logits[i, j] = max_j logits[i, j]
// Shapes: logits [n, count] f32, id [n] int32; contiguous device memory.
// Edge:   a row with a NaN gives -1. n == 0 does nothing.
// Errors: cudaErrorInvalidValue count < 1.
// Threads: reentrant; only enqueues.
// Cost:   reads logits once; one block a row.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

cudaError_t ArgmaxCuda(const float* logits, int64_t n, int64_t count, int32_t* id,
                       cudaStream_t stream);
void RefArgmax(const float* logits, int64_t n, int64_t count, int32_t* id);

}  // namespace carrel::kernels
