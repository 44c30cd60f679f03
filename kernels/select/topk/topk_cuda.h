// What:   the k largest scores of each KV head, on the GPU.
// Math:   ids = the first min(k, n) indices when all are ordered by (score descending, index
//         ascending).
// Source: radix select: the k-th largest is found 11, 11 and 10 bits at a time.
// Shapes: scores [kv_heads, score_stride] f32, of which the first n count; ids [kv_heads, k] int32.
//         n < 2^30; score_stride a multiple of 4, scores at a multiple of 16 bytes.
// Order:  first those above the k-th score, then those equal to it, each ascending by index.
// Edge:   NaN counts as -inf and -0 as 0; k == 0 or n == 0: nothing is enqueued; n < k: places
//         n .. k - 1 are left as they were.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads the scores four times, mostly from L2; one cooperative launch, which may be captured in a graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

struct TopKCudaParams {
  const float* scores = nullptr;
  int64_t kv_heads = 0;
  int64_t n = 0;
  int64_t score_stride = 0;
  int64_t k = 0;
  int32_t* ids = nullptr;
  void* workspace = nullptr;  // TopKWorkspaceBytes
};

// Zeroed once before its first use; every call leaves it ready for the next. One call at a time.
size_t TopKWorkspaceBytes(int64_t kv_heads);
cudaError_t TopKCuda(const TopKCudaParams& params, cudaStream_t stream);

}  // namespace carrel::kernels
