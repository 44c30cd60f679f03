// What:   what predicted queries lack, learned from the true ones on the GPU: as query_drift.h.
// Math:   that of query_drift.h, in fp32.
// Shapes: as there; tokens [heads] int32: each head counts its own. head_dim even, 2 .. 2048.
// Units:  token i stands at first_position + i; *step, if given, is added when the kernel runs, so
//         that a captured graph can be replayed.
// Edge:   n == 0 does nothing.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant; only enqueues.
// Cost:   one launch; reads q and predicted_q once; the angles are computed once per head and token.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

struct QueryDriftCudaParams {
  const float* q = nullptr;
  const float* predicted_q = nullptr;
  int64_t n = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t first_position = 0;
  const int32_t* step = nullptr;
  const float* inv_freq = nullptr;
  float newest = 0;
  float* mean = nullptr;
  int32_t* tokens = nullptr;
};

cudaError_t LearnQueryDriftCuda(const QueryDriftCudaParams& params, cudaStream_t stream);

}  // namespace carrel::kernels
