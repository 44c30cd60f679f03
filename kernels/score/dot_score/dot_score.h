// What:   exact inner products of a group's queries with bf16 rows.
// Math:   scores[h, j] = scale * <q[h], k[j]>, fp32 sums; with AMX, where head_dim is a multiple of 32,
//         on its tiles (dot_score_amx.h)
// Shapes: q [group, head_dim] f32; rows of head_dim bf16 at any byte address: contiguous from `k`
//         (DotScore) or anywhere (DotScoreRows); scores [group, score_stride >= rows] f32.
// Edge:   rows == 0 does nothing.
// Threads: reentrant; splitting rows changes no bit, and both versions give the same bits.
// Cost:   reads each row once for the whole group (AMX: for 128 queries).
#pragma once

#include <cstdint>

namespace carrel {
class ThreadPool;
}

namespace carrel::kernels {

void DotScore(const float* q, int64_t group, int64_t head_dim, const void* k, int64_t rows,
              float scale, float* scores, int64_t score_stride);
void DotScoreRows(const float* q, int64_t group, int64_t head_dim, const void* const* k,
                  int64_t rows, float scale, float* scores, int64_t score_stride);
// Shared with the pool's threads (null: none) in parts of some microseconds each.
void DotScoreRows(const float* q, int64_t group, int64_t head_dim, const void* const* k,
                  int64_t rows, float scale, float* scores, int64_t score_stride, ThreadPool* pool);
void RefDotScoreRows(const float* q, int64_t group, int64_t head_dim, const void* const* k,
                     int64_t rows, float scale, float* scores, int64_t score_stride);

// <a, b> of two bf16 rows, fp32 sums: the distance of index construction.
float DotBf16(const void* a, const void* b, int64_t head_dim);
// <q, k> of an fp32 query and a bf16 row.
float DotF32Bf16(const float* q, const void* k, int64_t head_dim);

}  // namespace carrel::kernels
