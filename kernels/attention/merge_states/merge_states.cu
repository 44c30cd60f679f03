#include <cuda_bf16.h>

#include "kernels/attention/merge_states/merge_states_cuda.h"
#include "kernels/launch-inl.cuh"
#include "kernels/mma-inl.cuh"

namespace carrel::kernels {
namespace {

// A block per head, a thread per element.
__global__ void MergeStatesKernel(const MergeStatesCudaParams p) {
  AllowNextLaunch();
  const int64_t h = blockIdx.x, i = h * p.head_dim + threadIdx.x;
  const float lse_a = p.lse_a[h], lse_b = p.lse_b[h];
  __syncthreads();  // lse_a is replaced below
  float out;
  if (lse_b == -INFINITY) {
    out = p.out_a[i];
  } else if (lse_a == -INFINITY) {
    out = p.out_b[i];
    p.out_a[i] = out;
    if (threadIdx.x == 0) p.lse_a[h] = lse_b;
  } else {
    const double max = fmax(lse_a, lse_b);
    const double a = exp(lse_a - max), b = exp(lse_b - max), sum = a + b;
    out = static_cast<float>(a / sum) * p.out_a[i] + static_cast<float>(b / sum) * p.out_b[i];
    p.out_a[i] = out;
    if (threadIdx.x == 0) p.lse_a[h] = static_cast<float>(max + log(sum));
  }
  if (p.out_bf16 != nullptr) p.out_bf16[i] = __bfloat16_as_ushort(__float2bfloat16(out));
}

}  // namespace

cudaError_t MergeStatesCuda(const MergeStatesCudaParams& p, cudaStream_t stream) {
  if (p.heads < 0 || p.heads > INT32_MAX || p.head_dim < 1 || p.head_dim > 1024) {
    return cudaErrorInvalidValue;
  }
  if (p.heads == 0) return cudaSuccess;
  return Launch({.grid = GridOf(p.heads), .threads = static_cast<int>(p.head_dim)}, stream,
                MergeStatesKernel, p);
}

}  // namespace carrel::kernels
