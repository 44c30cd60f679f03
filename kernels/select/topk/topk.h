// What:   the k largest scores.
// Math:   out = the first min(k, n) indices when all are ordered by (score descending, index
//         ascending).
// Shapes: scores [n < 2^31] f32; out [k] int64 indices into scores.
// Edge:   NaN counts as -inf and -0 as 0; k == 0 or n == 0 gives none.
// Threads: reentrant.
// Cost:   O(n) plus O(k log k).
#pragma once

#include <cstdint>
#include <vector>

namespace carrel::kernels {

// Returns how many were written. scratch grows to what is needed and may be reused.
int64_t TopK(const float* scores, int64_t n, int64_t k, int64_t* out,
             std::vector<uint64_t>& scratch);
int64_t RefTopK(const float* scores, int64_t n, int64_t k, int64_t* out);

// The same k, their indices ascending: without a sort.
int64_t TopKAscending(const float* scores, int64_t n, int64_t k, int64_t* out,
                      std::vector<uint64_t>& scratch);

// The score of the last of them, 1 <= k; of n > 0 scores, the least if k > n.
float KthLargest(const float* scores, int64_t n, int64_t k);

// Indices of the k largest by the same order, ascending. k >= scores.size(): all.
std::vector<int64_t> BestIndices(const std::vector<float>& scores, int64_t k);

}  // namespace carrel::kernels
