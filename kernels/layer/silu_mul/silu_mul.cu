#include "kernels/half-inl.cuh"
#include "kernels/layer/silu_mul/silu_mul_cuda.h"
#include "kernels/mma-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float SiluMul(float gate, float up) {
  return gate / (1.0f + __expf(-gate)) * up;
}

template <HalfType kType>
__global__ void __launch_bounds__(kThreads)
    SiluMulKernel(const float4* gate_up, int64_t pieces, int64_t row_pieces, uint2* y) {
  AllowNextLaunch();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;  // of four elements
  if (i >= pieces) return;
  const int64_t row = i / row_pieces, piece = i % row_pieces;
  const float4 g = gate_up[2 * row * row_pieces + piece];
  const float4 u = gate_up[(2 * row + 1) * row_pieces + piece];
  y[i] = make_uint2(PackPair<kType>(SiluMul(g.x, u.x), SiluMul(g.y, u.y)),
                    PackPair<kType>(SiluMul(g.z, u.z), SiluMul(g.w, u.w)));
}

}  // namespace

cudaError_t SiluMulCuda(const float* gate_up, int64_t n, int64_t width, void* y,
                        cudaStream_t stream, HalfType type) {
  if (n < 0 || width < 4 || width % 4 != 0) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  const int64_t pieces = n * width / 4;
  const auto kernel =
      type == HalfType::kBf16 ? SiluMulKernel<HalfType::kBf16> : SiluMulKernel<HalfType::kF16>;
  kernel<<<static_cast<unsigned>((pieces + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      reinterpret_cast<const float4*>(gate_up), pieces, width / 4, static_cast<uint2*>(y));
  return cudaGetLastError();
}

}  // namespace carrel::kernels
