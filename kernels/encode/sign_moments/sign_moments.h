// What:   the signs of the columns of a matrix and their second moment, counted rather than
//         multiplied: what a least-squares decoder of sign codes is solved from.
// Math:   s[n, i] = 1 where y[n, i] > 0, else -1;
//         positive[i] += |{n: s[n, i] = 1}|;  differ[i, j] += |{n: s[n, i] != s[n, j]}|,
//         so that over N rows sum_n s[n, i] = 2 positive[i] - N and
//         sum_n s[n, i] s[n, j] = N - 2 differ[i, j].
// Shapes: y [rows, columns] f32, replaced by s; positive [columns], differ [columns, columns] int32.
// Edge:   no rows, or no columns: nothing changes. NaN has sign -1.
// Source: ours: products of signs are exclusive ors of 32 rows' bits, summed by their population.
// Threads: reentrant.
// Cost:   columns / 32 operations on a lane of 32 bits per element of y; exact.
#pragma once

#include <cstdint>

namespace carrel::kernels {

void AddSignMoments(float* y, int64_t rows, int64_t columns, int32_t* positive, int32_t* differ);
void RefAddSignMoments(float* y, int64_t rows, int64_t columns, int32_t* positive, int32_t* differ);

}  // namespace carrel::kernels
