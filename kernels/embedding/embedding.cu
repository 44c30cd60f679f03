#include "kernels/embedding/embedding_cuda.h"
#include "kernels/half-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;

template <HalfType kType>
__global__ void __launch_bounds__(kThreads)
    EmbeddingKernel(const uint32_t* table, const int32_t* ids, int64_t pairs, float2* y) {
  const uint32_t* const from = table + ids[blockIdx.x] * pairs;
  float2* const to = y + int64_t{blockIdx.x} * pairs;
  for (int64_t c = threadIdx.x; c < pairs; c += kThreads) to[c] = UnpackPair<kType>(from[c]);
}

}  // namespace

cudaError_t EmbeddingCuda(const void* table, const int32_t* ids, int64_t n, int64_t dim, float* y,
                          cudaStream_t stream, HalfType type) {
  if (n < 0 || dim < 2 || dim % 2 != 0) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  const auto kernel =
      type == HalfType::kBf16 ? EmbeddingKernel<HalfType::kBf16> : EmbeddingKernel<HalfType::kF16>;
  kernel<<<static_cast<unsigned>(n), kThreads, 0, stream>>>(
      static_cast<const uint32_t*>(table), ids, dim / 2, reinterpret_cast<float2*>(y));
  return cudaGetLastError();
}

}  // namespace carrel::kernels
