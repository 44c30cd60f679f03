// What:   of candidate rows, those that the q heads of a group score best by the rows' own keys, on
//         the GPU; and, where it is asked for, attention over them in the same launch.
// Math:   s[h, i] = scale * <q[h], k[g, candidates[g, i]]>, g = h / group; base[h] = ln sum_i
//         exp(s[h, i]) over the candidates; score[g, i] = max over h of the group of (s[h, i] -
//         base[h]) (group_score.h). ids = the rows of the first min(k[g], count) candidates when
//         all are ordered by (score descending, i ascending). Scores are compared in steps of 2^-6,
//         and what lies below -32 as -32. out[h] = sum over ids of softmax(s[h, i]) v[g, i], lse[h]
//         its logarithm of the sum of exponentials: sparse_attention of ids.
// Source: decision 004; candidates are what codes or labels chose (docs/methods.md).
// Shapes: q [kv_heads * group, head_dim] bf16; k [kv_heads, row_stride, head_dim] bf16, in device
//         memory or, where nothing is attended to, in pinned host memory, which is read where it
//         lies; v as k; out [kv_heads * group, head_dim] and lse [kv_heads * group] f32;
//         candidates [kv_heads, candidate_stride] int32 in 0 .. row_stride - 1, of which the first
//         `count` matter; ids [kv_heads, k] int32. head_dim 64 or 128; group 1 .. 16; count at most
//         MostRescoredRows(group). q, k, v at multiples of 16 bytes.
// Units:  scale > 0 includes 1/sqrt(head_dim).
// Order:  not by score: first the candidates above the k-th score, in their order, then those equal
//         to it.
// Edge:   count == 0 or k == 0: nothing is enqueued; places from min(k[g], count) on are left as
//         they were. Scores are finite.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant.
// Cost:   reads the candidates' keys once, and the chosen rows' V; one launch for up to kMostTogether sequences alike
//         in shape and in how their candidates are cut into blocks, which may be captured in a graph: a cluster of up to eight blocks per KV head where the architecture
//         has clusters, otherwise one.
#pragma once

#include <cstdint>
#include <span>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct RescoreRowsParams {
  const Bf16* q = nullptr;
  KvView kv;
  const int32_t* candidates = nullptr;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  int64_t candidate_stride = 0;  // candidates from one KV head to the next
  int64_t count = 0;
  int64_t wanted = 0;                       // k
  const int32_t* wanted_of_head = nullptr;  // k[kv_heads], on the device, 1 .. k; null: k
  float scale = 0;
  int32_t* ids = nullptr;
  float* base = nullptr;  // [kv_heads * group], or null: not wanted
  float* out = nullptr;   // null: nothing is attended to
  float* lse = nullptr;
};

// What the current device's shared memory holds.
int64_t MostRescoredRows(int64_t group);
// One token each of several sequences: each gets the bits that it gets alone.
cudaError_t RescoreRows(std::span<const RescoreRowsParams> all, cudaStream_t stream);
inline cudaError_t RescoreRows(const RescoreRowsParams& params, cudaStream_t stream) {
  return RescoreRows({&params, 1}, stream);
}
void RefRescoreRows(const RescoreRowsParams& params);  // host pointers; fp64, unrounded scores

}  // namespace carrel::kernels
