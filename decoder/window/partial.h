// What:   partial attention of a block of new tokens over the rows seen so far: (out, lse) per
//         token and q head, which disjoint sets of rows are merged into.
// Shapes: out [n, q_heads, head_dim] f32, lse [n, q_heads] f32.
// Edge:   starts as the empty set (out 0, lse -inf).
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attention/merge_states/merge_states.h"

namespace carrel::decoder {

struct Partial {
  std::vector<float> out;
  std::vector<float> lse;

  void Reset(int64_t n, int64_t q_heads, int64_t head_dim) {
    out.assign(static_cast<size_t>(n * q_heads * head_dim), 0.0f);
    lse.assign(static_cast<size_t>(n * q_heads), -INFINITY);
  }
  // Merges (other_out [heads, head_dim], other_lse [heads]) into the heads of token that begin at
  // q_head.
  void Merge(int64_t token, int64_t q_heads, int64_t q_head, int64_t heads, int64_t head_dim,
             const float* other_out, const float* other_lse) {
    const int64_t at = token * q_heads + q_head;
    kernels::MergeStates(&out[at * head_dim], &lse[at], other_out, other_lse, heads, head_dim);
  }
};

}  // namespace carrel::decoder
