// What:   dot_score on AMX's tiles. Called by dot_score.cc alone, where TakesTiles(head_dim).
// Math:   a query is three parts of bf16 and a row one: products are those of f32, and sums begin with
//         the smallest part. A row or a query with an infinity gives NaN; numbers below 2^-126 count as
//         zero.
// Threads: reentrant. A score depends on its query and its row alone.
// Cost:   three products of tiles for 16 queries, 16 rows and 32 columns, however many queries there are.
#pragma once

#include <cstdint>

namespace carrel::kernels {

bool TakesTiles(int64_t head_dim);

// row_at: rows anywhere, or null: they lie one after the other from k on.
void DotScoreInParts(const float* q, int64_t group, int64_t head_dim, const void* k,
                     const void* const* row_at, int64_t rows, float scale, float* scores,
                     int64_t score_stride);

}  // namespace carrel::kernels
