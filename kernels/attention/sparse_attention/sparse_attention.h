// What:   attention of one token's group of q heads over bf16 rows that lie anywhere: retrieved
//         rows, or a mapped segment.
// Math:   out[h] = sum_{j < rows} softmax_j(scores[h, j]) v[j]; lse[h] = ln sum_j exp(scores[h, j])
//         with scores[h, j] = scale * <q[h], k[j]> computed here, or given (already scaled) when k
//         is null.
// Shapes: q, out [group, head_dim] f32; k[j], v[j] point at head_dim bf16, at any byte address;
//         scores [group, score_stride >= rows] f32; lse [group] f32.
// Units:  scale includes 1/sqrt(head_dim); lse is a natural logarithm.
// Edge:   no rows, or only scores of -inf => out = 0, lse = -inf, never NaN.
// Threads: reentrant.
// Cost:   reads each k and v row once for the group (v once per 16 heads of a larger group).
#pragma once

#include <cstdint>

namespace carrel::kernels {

struct SparseAttentionParams {
  const float* q = nullptr;
  int64_t group = 0;
  const void* const* k = nullptr;  // [rows], or null if scores are given
  const void* const* v = nullptr;  // [rows]
  int64_t rows = 0;
  int64_t head_dim = 0;
  float scale = 0;
  float* scores = nullptr;   // [group, rows]: written if k is given, read otherwise; never null
  int64_t score_stride = 0;  // from a head's scores to the next one's; 0: rows
  float* out = nullptr;
  float* lse = nullptr;
};

void SparseAttention(const SparseAttentionParams& params);
void RefSparseAttention(const SparseAttentionParams& params);

}  // namespace carrel::kernels
