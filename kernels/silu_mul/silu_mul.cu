#include <cuda_bf16.h>

#include "kernels/silu_mul/silu_mul_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ __nv_bfloat162 SiluMul2(__nv_bfloat162 gate, __nv_bfloat162 up) {
  const float2 g = __bfloat1622float2(gate), u = __bfloat1622float2(up);
  return __floats2bfloat162_rn(g.x / (1.0f + __expf(-g.x)) * u.x,
                               g.y / (1.0f + __expf(-g.y)) * u.y);
}

__global__ void __launch_bounds__(kThreads) SiluMulKernel(const uint4* gate_up, int64_t pieces,
                                                          int64_t row_pieces, uint4* y) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;  // of eight elements
  if (i >= pieces) return;
  const int64_t row = i / row_pieces, piece = i % row_pieces;
  const uint4 gate = gate_up[2 * row * row_pieces + piece];
  const uint4 up = gate_up[(2 * row + 1) * row_pieces + piece];
  uint4 out;
  const auto* g = reinterpret_cast<const __nv_bfloat162*>(&gate);
  const auto* u = reinterpret_cast<const __nv_bfloat162*>(&up);
  auto* o = reinterpret_cast<__nv_bfloat162*>(&out);
#pragma unroll
  for (int e = 0; e < 4; ++e) o[e] = SiluMul2(g[e], u[e]);
  y[i] = out;
}

}  // namespace

cudaError_t SiluMulCuda(const void* gate_up, int64_t n, int64_t width, void* y,
                        cudaStream_t stream) {
  if (n < 0 || width < 8 || width % 8 != 0) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  const int64_t pieces = n * width / 8;
  SiluMulKernel<<<static_cast<unsigned>((pieces + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      static_cast<const uint4*>(gate_up), pieces, width / 8, static_cast<uint4*>(y));
  return cudaGetLastError();
}

}  // namespace carrel::kernels
