#include <cuda_bf16.h>

#include "kernels/embedding/embedding_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    EmbeddingKernel(const __nv_bfloat162* table, const int32_t* ids, int64_t pairs, float2* y) {
  const __nv_bfloat162* const from = table + ids[blockIdx.x] * pairs;
  float2* const to = y + int64_t{blockIdx.x} * pairs;
  for (int64_t c = threadIdx.x; c < pairs; c += kThreads) to[c] = __bfloat1622float2(from[c]);
}

}  // namespace

cudaError_t EmbeddingCuda(const void* table, const int32_t* ids, int64_t n, int64_t dim, float* y,
                          cudaStream_t stream) {
  if (n < 0 || dim < 2 || dim % 2 != 0) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  EmbeddingKernel<<<static_cast<unsigned>(n), kThreads, 0, stream>>>(
      static_cast<const __nv_bfloat162*>(table), ids, dim / 2, reinterpret_cast<float2*>(y));
  return cudaGetLastError();
}

}  // namespace carrel::kernels
