// What:   sparse_attention whose rows are cut into spans, so that threads can share them.
// Math:   each span has a state of its own (out, lse); the states are merged in order (merge_states).
//         The cut depends on the number of rows alone: whoever attends to the spans, the bits are the same.
//         One span has the bits of SparseAttention.
// Shapes: states: SparseSpanFloats of them.
// Threads: SparseAttentionSpan of different spans at once; MergeSparseSpans after all of them.
#pragma once

#include <cstdint>

#include "kernels/attention/sparse_attention/sparse_attention.h"

namespace carrel::kernels {

// Spans that attention to so many rows is cut into: 1 and more.
int64_t SparseSpans(int64_t rows);
// The first row of a span; of the span behind the last one, `rows`.
inline int64_t SparseSpanBegin(int64_t rows, int64_t span) {
  return rows * span / SparseSpans(rows);
}
// Floats that the states of all spans take beside params.out and params.lse.
int64_t SparseSpanFloats(const SparseAttentionParams& params);

// Of `params`, which has all rows: the span's. What it reads of params.k and params.v are the span's.
void SparseAttentionSpan(const SparseAttentionParams& params, int64_t span, float* states);
// Into params.out and params.lse.
void MergeSparseSpans(const SparseAttentionParams& params, const float* states);

}  // namespace carrel::kernels
