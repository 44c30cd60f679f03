// What:   sums of the rows of each KV head, in parts, on the GPU: what their mean is made of.
// Math:   sums[g, s] = sum of x[g, j] over the rows j of part s; the parts are equal and in order.
//         fp32.
// Shapes: x [kv_heads, row_stride, head_dim] bf16, of which the first `rows` count; sums [kv_heads,
//         parts, head_dim] f32. head_dim 64 or 128; x at multiples of 16 bytes.
// Edge:   a part without rows is 0.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant.
// Cost:   reads x once; one launch.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct RowSumParams {
  const Bf16* x = nullptr;
  int64_t kv_heads = 0;
  int64_t rows = 0;
  int64_t row_stride = 0;  // rows from one KV head to the next
  int64_t head_dim = 0;
  int64_t parts = 0;  // 1 .. 65535
  float* sums = nullptr;
};

cudaError_t RowSum(const RowSumParams& params, cudaStream_t stream);
void RefRowSum(const RowSumParams& params);  // host pointers; fp64 sums

}  // namespace carrel::kernels
