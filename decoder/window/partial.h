// What:   partial attention of a block of new tokens over the rows seen so far: (out, lse) per
//         token and q head, which disjoint sets of rows are merged into.
// Shapes: out [n, q_heads, head_dim] f32, lse [n, q_heads] f32.
// Edge:   starts as the empty set (out 0, lse -inf).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"

namespace carrel::decoder {

// Rows of one KV head by their addresses: bf16, anywhere.
using RowAddresses = absl::Span<const void* const>;

// Attention of a KV head's q heads [group, head_dim] to rows: state gets out [group, head_dim], then lse
// [group].
void AttendRows(const AttentionShape& shape, const float* q, RowAddresses k, RowAddresses v,
                float* state);

struct Partial {
  std::vector<float> out;
  std::vector<float> lse;

  void Reset(int64_t n, const AttentionShape& shape);
  // Merges (other_out [group, head_dim], other_lse [group]) into the q heads of a token's KV head.
  void Merge(const AttentionShape& shape, int64_t token, KvHead head, const float* other_out,
             const float* other_lse);
  // Likewise a state of AttendRows.
  void Merge(const AttentionShape& shape, int64_t token, KvHead head, const float* state) {
    Merge(shape, token, head, state, state + int64_t{shape.group()} * shape.head_dim);
  }
  // Attends to rows and merges; q [n, q_heads, head_dim].
  void Attend(const AttentionShape& shape, int64_t token, KvHead head, const float* q,
              RowAddresses k, RowAddresses v);
};

}  // namespace carrel::decoder
