// What:   binary codes of rows: projection, sign and packing in one pass.
// Math:   bit i of a row x is set exactly if <matrix[h, i], x> > threshold[h, i], fp32 sums.
// Source: HATA (2025, section 3): h(x) = sign(x W), one W per KV head; here W is stored by
//         direction.
// Shapes: x [kv_heads, row_stride, head_dim] bf16, of which the first `rows` count: keys, or the
//         group's q heads of one token (rows = row_stride = group); matrix [kv_heads, bits,
//         head_dim] bf16; codes [kv_heads, code_stride, bits / 32] uint32, bit i of a row in word
//         i / 32 at i % 32. The order of bits is that of kvstore's codes (kernels/score/code_score); a
//         key's bits lie together instead of in blocks of 64 keys, since a thread compares a whole
//         key. head_dim 64 or 128; bits 64, 128 or 256; x, matrix and codes at multiples of 16
//         bytes.
// Edge:   no rows: nothing is enqueued. NaN gives 0.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant.
// Cost:   reads x once, the matrix once per 2,048 rows; one launch, which may be captured in a
//         graph.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct HashEncodeParams {
  const Bf16* x = nullptr;
  const Bf16* matrix = nullptr;
  uint32_t* codes = nullptr;
  int64_t kv_heads = 0;
  int64_t rows = 0;
  int64_t row_stride = 0;   // rows from one KV head to the next
  int64_t code_stride = 0;  // codes from one KV head to the next
  int64_t head_dim = 0;
  int64_t bits = 0;
  const float* threshold = nullptr;  // [kv_heads, bits]; null: 0
};

cudaError_t HashEncode(const HashEncodeParams& params, cudaStream_t stream);
// Host pointers. margin, if not null: [kv_heads, rows, bits], (<direction, x> - threshold) /
// (|direction| |x|).
void RefHashEncode(const HashEncodeParams& params, float* margin);

}  // namespace carrel::kernels
