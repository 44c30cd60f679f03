// What:   what predicted queries lack, learned from the true ones: a running mean before RoPE.
// Math:   token after token, with known = mean as it was before the first:
//         lack = known + R_i^-1 (q[i] - predicted_q[i]);  t <- t + 1;
//         mean <- mean + max(1 / t, newest) (lack - mean).  R_i: RoPE at first_position + i.
// Source: ours; what it is for is in docs/decisions/026-what-speculation-knows.md.
// Shapes: q, predicted_q [n, heads, head_dim] f32 after RoPE, and `known` was added to the predicted queries before
//         it; mean [heads, head_dim] f32, zeros as long as t = 0; inv_freq [head_dim / 2] f32, or
//         null: queries stand nowhere.
// Edge:   newest = 0 gives the plain mean. n == 0 changes nothing.
// Threads: reentrant.
// Cost:   reads q and predicted_q once.
#pragma once

#include <cstdint>

namespace carrel::kernels {

struct QueryDriftParams {
  const float* q = nullptr;
  const float* predicted_q = nullptr;
  int64_t n = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t first_position = 0;
  const float* inv_freq = nullptr;
  float newest = 0;
  float* mean = nullptr;
  int64_t* tokens = nullptr;  // t
  float* scratch = nullptr;   // 2 * heads * head_dim
};

void LearnQueryDrift(const QueryDriftParams& params);
void RefLearnQueryDrift(const QueryDriftParams& params);  // needs no scratch

}  // namespace carrel::kernels
