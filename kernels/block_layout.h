// What:   how tokens are cut into blocks that attend together, and what a block attends to without
//         having chosen it: what the kernels of block_prune and block_sparse_attention agree on. Sparse
//         prefill has blocks of 64 tokens; a decoder's token is a block of its own.
// Math:   block b holds tokens [first(b), first(b) + tokens(b)) of the document. It attends to the
//         first sink(b) tokens, to rows chosen from its zone [sink(b), zone_end(b)), to the window
//         [zone_end(b), first(b)), and causally to itself. The window is `window` tokens, and all from
//         token zone_limit on.
// Source: prefill/sparse_attention.h, which does the same on a CPU.
// Shapes: first_position is a multiple of block_q, so that a token's block does not depend on how the
//         document is passed; the last block may be short. A unit is one KV head of one block: number
//         b * kv_heads + head.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

struct BlockLayout {
  int64_t first_position = 0;
  int64_t n = 0;  // tokens
  int64_t block_q = 0;
  int64_t sink_tokens = 0;
  int64_t window = 0;
  int64_t zone_limit = INT64_MAX;

  __host__ __device__ int64_t blocks() const { return (n + block_q - 1) / block_q; }
  __host__ __device__ int64_t first(int64_t block) const {
    return first_position + block * block_q;
  }
  __host__ __device__ int64_t tokens(int64_t block) const {
    const int64_t left = n - block * block_q;
    return left < block_q ? left : block_q;
  }
  __host__ __device__ int64_t sink(int64_t block) const {
    return sink_tokens < first(block) ? sink_tokens : first(block);
  }
  __host__ __device__ int64_t zone_end(int64_t block) const {
    int64_t end = first(block) - window;
    if (end > zone_limit) end = zone_limit;
    return end > sink(block) ? end : sink(block);
  }
  __host__ __device__ int64_t zone_rows(int64_t block) const {
    return zone_end(block) - sink(block);
  }
};

// Rows of a unit, ascending: `count` stretches of `length` rows, the last as long as `rows` leaves it.
struct ChosenRowsHead {
  int32_t count, length, rows;
};
struct ChosenRows {
  int32_t* begins = nullptr;  // [units, stride]: first rows of the stretches
  int64_t stride = 0;
  ChosenRowsHead* heads = nullptr;  // [units]
};

// Cosines and sines of RoPE: [positions, 2, head_dim / 2] f32, as kernels/layer/rope/rope_table.h has
// them. A position beyond the last counts as the last.
struct TurnTable {
  const float* angles = nullptr;
  int64_t positions = 0;
};

}  // namespace carrel::kernels
