// What:  rows of K and V as kernels on a GPU take them: what an element is, and where a layer's rows lie.
// Shapes: k, v [kv_heads, row_stride, head_dim], at multiples of 16 bytes. How many heads there are, how
//         wide, and which of their rows matter is said beside a view.
// Units: row_stride in rows, from one KV head to the next.
// Edge:  a kernel that reads keys alone does not look at v.
// Not for: rows that CPU kernels read where they are mapped, at any alignment, and weights in either type
//         of half_type.h: these are void*.
#pragma once

#include <cstdint>

namespace carrel::kernels {

using Bf16 = uint16_t;  // its bits

struct KvView {
  const Bf16* k = nullptr;
  const Bf16* v = nullptr;
  int64_t row_stride = 0;
};

// Rows that may be written.
struct KvRows {
  Bf16* k = nullptr;
  Bf16* v = nullptr;
  int64_t row_stride = 0;

  operator KvView() const { return {k, v, row_stride}; }
};

}  // namespace carrel::kernels
