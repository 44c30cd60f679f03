// What:   one score per row for the q heads that share a KV head (group_score.h), on the GPU.
// Math:   base[h] = ln sum_j exp(scores[h, j]) over j < n; out[g, j] = max over h of the group of
//         (scores[h, j] - base[h]). fp32, sums of exponentials in parts.
// Shapes: scores [kv_heads * group, score_stride] f32, of which the first n count; out [kv_heads,
//         out_stride] f32. group 1 .. 16; strides multiples of 4; both at multiples of 16 bytes.
// Edge:   scores are finite. n == 0: nothing is enqueued.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads the scores twice; two launches, which may be captured in a graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

struct GroupScoreCudaParams {
  const float* scores = nullptr;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t n = 0;
  int64_t score_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  float* base = nullptr;      // [kv_heads * group], or null: not wanted
  void* workspace = nullptr;  // GroupScoreWorkspaceBytes
};

size_t GroupScoreWorkspaceBytes(int64_t kv_heads, int64_t group);
cudaError_t GroupScoreCuda(const GroupScoreCudaParams& params, cudaStream_t stream);

}  // namespace carrel::kernels
