// What:   exact inner products of each group's queries with all rows of its KV head, on the GPU.
// Math:   scores[h, i] = scale * <q[h], k[g, i]>, g = h / group; fp32 sums.
//         Where states are wanted: of part p of the rows, states[h, p] = (m, sum_i exp(scores[h, i]
//         - m)), m the largest of its scores; -inf and 0 of a part without rows.
// Shapes: q [kv_heads * group, head_dim] bf16; k [kv_heads, row_stride, head_dim] bf16, in device
//         or pinned host memory; scores [kv_heads * group, score_stride] f32, of which the first
//         `rows` are written;
//         states [kv_heads * group, DotScoreParts(kv_heads, rows), 2] f32, or null.
//         head_dim 64 or 128; group 1 .. 16; q and k at multiples of 16 bytes.
// Edge:   no rows: nothing is enqueued.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant.
// Cost:   reads each row once for the whole group; one launch, which may be captured in a graph.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct DotScoreCudaParams {
  const Bf16* q = nullptr;
  KvView kv;  // keys
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  int64_t rows = 0;
  int64_t score_stride = 0;
  float scale = 0;
  float* scores = nullptr;
  float* states = nullptr;
};

// Parts of a KV head's rows on the current device, at most kMaxDotScoreParts.
inline constexpr int64_t kMaxDotScoreParts = 512;
int64_t DotScoreParts(int64_t kv_heads, int64_t rows);
cudaError_t DotScoreCuda(const DotScoreCudaParams& params, cudaStream_t stream);

}  // namespace carrel::kernels
