// What:   the largest number of each row, on the CPU.
// Math:   id[i] = the least j with x[i, j] = max_j x[i, j]
// Shapes: x [n, count] f32 contiguous, id [n]; count >= 1.
// Edge:   NaN is less than every number; a row of nothing else gives 0. n == 0 does nothing.
// Threads: reentrant.     Cost: reads x once.
#pragma once

#include <cstdint>

namespace carrel::kernels {

void ArgmaxRows(const float* x, int64_t n, int64_t count, int32_t* id);

}  // namespace carrel::kernels
