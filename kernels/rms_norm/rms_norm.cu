#include <cuda_bf16.h>

#include "kernels/rms_norm/rms_norm_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const float* x, int64_t dim, const float* w, float eps, __nv_bfloat16* y) {
  __shared__ float sums[kThreads / 32];
  const float4* const row = reinterpret_cast<const float4*>(x + int64_t{blockIdx.x} * dim);
  const float4* const weights = reinterpret_cast<const float4*>(w);
  const int quads = static_cast<int>(dim / 4);
  float sum = 0;
  for (int c = threadIdx.x; c < quads; c += kThreads) {
    const float4 v = row[c];
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < kThreads / 32; ++i) sum += sums[i];
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
  __nv_bfloat162* const out = reinterpret_cast<__nv_bfloat162*>(y + int64_t{blockIdx.x} * dim);
  for (int c = threadIdx.x; c < quads; c += kThreads) {
    const float4 v = row[c], g = weights[c];
    out[2 * c] = __floats2bfloat162_rn(v.x * factor * g.x, v.y * factor * g.y);
    out[2 * c + 1] = __floats2bfloat162_rn(v.z * factor * g.z, v.w * factor * g.w);
  }
}

}  // namespace

cudaError_t RmsNormCuda(const float* x, int64_t n, int64_t dim, const float* w, float eps, void* y,
                        cudaStream_t stream) {
  if (n < 0 || dim < 4 || dim % 4 != 0) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  RmsNormKernel<<<static_cast<unsigned>(n), kThreads, 0, stream>>>(x, dim, w, eps,
                                                                   static_cast<__nv_bfloat16*>(y));
  return cudaGetLastError();
}

}  // namespace carrel::kernels
