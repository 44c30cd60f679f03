#include "kernels/half-inl.cuh"
#include "kernels/layer/rms_norm/rms_norm_cuda.h"
#include "kernels/mma-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;

template <HalfType kType>
__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const float* x, int64_t dim, const float* w, float eps, uint32_t* y) {
  AllowNextLaunch();
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
  uint32_t* const out = y + int64_t{blockIdx.x} * dim / 2;
  for (int c = threadIdx.x; c < quads; c += kThreads) {
    const float4 v = row[c], g = weights[c];
    out[2 * c] = PackPair<kType>(v.x * factor * g.x, v.y * factor * g.y);
    out[2 * c + 1] = PackPair<kType>(v.z * factor * g.z, v.w * factor * g.w);
  }
}

}  // namespace

cudaError_t RmsNormCuda(const float* x, int64_t n, int64_t dim, const float* w, float eps, void* y,
                        cudaStream_t stream, HalfType type) {
  if (n < 0 || dim < 4 || dim % 4 != 0) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  const auto kernel =
      type == HalfType::kBf16 ? RmsNormKernel<HalfType::kBf16> : RmsNormKernel<HalfType::kF16>;
  kernel<<<static_cast<unsigned>(n), kThreads, 0, stream>>>(x, dim, w, eps,
                                                            static_cast<uint32_t*>(y));
  return cudaGetLastError();
}

}  // namespace carrel::kernels
