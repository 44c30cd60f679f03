// What:   the k largest scores of each KV head, on the GPU.
// Math:   out = the first min(k, n) indices when all are ordered by (score descending, index
//         ascending), and their scores.
// Source: radix select: the k-th largest is found 11, 11 and 10 bits at a time.
// Shapes: scores [kv_heads, score_stride] f32, of which the first n count; ids [kv_heads, k] int32,
//         out_scores [kv_heads, k] f32. n < 2^30; k <= 4096; score_stride a multiple of 4, scores
//         at a multiple of 16 bytes. Where `sorted` is false, k is at most n's bound and out_scores
//         may be null.
// Order:  as in Math; where `sorted` is false, first those above the k-th score, then those equal
//         to it, each ascending by index.
// Edge:   NaN counts as -inf and -0 as 0, and so they come out; k == 0 or n == 0: nothing is
//         enqueued; n < k: places n .. k - 1 are left as they were.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads the scores four times, mostly from L2, and sorts k of them; one cooperative launch, which may be
//         captured in a graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

inline constexpr int64_t kMaxTopKCuda = 4096;  // sorted

struct TopKCudaParams {
  const float* scores = nullptr;
  int64_t kv_heads = 0;
  int64_t n = 0;
  int64_t score_stride = 0;
  int64_t k = 0;
  int32_t* ids = nullptr;
  float* out_scores = nullptr;
  void* workspace = nullptr;  // TopKWorkspaceBytes
  bool sorted = true;
};

// k: of calls that are sorted; 0: none is. Zeroed once before its first use; every call leaves it ready for the next. One call at a time.
size_t TopKWorkspaceBytes(int64_t kv_heads, int64_t k);
cudaError_t TopKCuda(const TopKCudaParams& params, cudaStream_t stream);

}  // namespace carrel::kernels
