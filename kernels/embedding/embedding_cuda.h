// What:   rows of an embedding table by token id, widened, on the GPU.
// Math:   y[i, c] = table[ids[i], c]
// Shapes: table [vocab, dim] of `type`, ids [n] int32, y [n, dim] f32; contiguous device memory;
//         dim a multiple of 2.
// Edge:   n == 0 does nothing. Ids are in range: the caller has checked them.
// Errors: cudaErrorInvalidValue a dim that does not fit.   Threads: reentrant; only enqueues.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/half_type.h"

namespace carrel::kernels {

cudaError_t EmbeddingCuda(const void* table, const int32_t* ids, int64_t n, int64_t dim, float* y,
                          cudaStream_t stream, HalfType type = HalfType::kBf16);
// bf16.
void RefEmbedding(const uint16_t* table, const int32_t* ids, int64_t n, int64_t dim, float* y);

}  // namespace carrel::kernels
