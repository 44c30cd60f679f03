#include "kernels/half-inl.cuh"
#include "kernels/layer/half_convert/half_convert.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    Bf16ToF16Kernel(const uint32_t* x, int64_t pairs, uint32_t* y) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= pairs) return;
  const float2 wide = UnpackPair<HalfType::kBf16>(x[i]);
  y[i] = PackPair<HalfType::kF16>(wide.x, wide.y);
}

}  // namespace

cudaError_t Bf16ToF16Cuda(const void* x, int64_t count, void* y, cudaStream_t stream) {
  if (count < 0 || count % 2 != 0) return cudaErrorInvalidValue;
  if (count == 0) return cudaSuccess;
  const int64_t pairs = count / 2;
  Bf16ToF16Kernel<<<static_cast<unsigned>((pairs + kThreads - 1) / kThreads), kThreads, 0,
                    stream>>>(static_cast<const uint32_t*>(x), pairs, static_cast<uint32_t*>(y));
  return cudaGetLastError();
}

}  // namespace carrel::kernels
