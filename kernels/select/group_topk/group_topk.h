// What:   the rows that each group of q heads scores best (group_score.h), from the scores of every
//         q head, on the GPU.
// Math:   base[h] = ln sum_p states[h, p].sum exp(states[h, p].max); score[g, j] = max over h of
//         the group of (scores[h, j] - base[h]). ids = the first min(k[g], n) rows when all are
//         ordered by (score descending, row ascending), k[g] = k or what k_of_head says. Scores are
//         compared in steps of 2^-10; what lies below -64 is -64.
// Source: decision 004; histograms of two digits, as topk.
// Shapes: scores [kv_heads * group, score_stride] f32, of which the first n count; states [kv_heads
//         * group, parts, 2] f32, as dot_score leaves them; ids [kv_heads, k] int32; base [kv_heads
//         * group] f32, or null. group 1 .. 16; n < 2^30; score_stride a multiple of 4; scores at a
//         multiple of 16 bytes.
// Order:  not by score: first the rows above the k-th score, ascending, then those equal to it,
//         ascending.
// Edge:   scores are finite. k == 0 or n == 0: nothing is enqueued; places from min(k[g], n) on are
//         left as they were.
// Errors: InvalidValue for a shape that is not served, more KV heads than SMs included.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads the scores once; a score's 16 bits stay in shared memory while they fit. One
//         cooperative launch, which may be captured in a graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

struct GroupTopKParams {
  const float* scores = nullptr;
  const float* states = nullptr;
  int64_t parts = 0;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t n = 0;
  int64_t score_stride = 0;
  int64_t k = 0;
  const int32_t* k_of_head = nullptr;  // [kv_heads], on the device, 1 .. k; null: k
  int32_t* ids = nullptr;
  float* base = nullptr;
  void* workspace = nullptr;  // GroupTopKWorkspaceBytes of these params
};

// Depends on kv_heads and n. Zeroed once before its first use; every call leaves it ready for the
// next with the same kv_heads. One call at a time.
size_t GroupTopKWorkspaceBytes(const GroupTopKParams& params);
cudaError_t GroupTopK(const GroupTopKParams& params, cudaStream_t stream);

}  // namespace carrel::kernels
