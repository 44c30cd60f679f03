#include "kernels/half-inl.cuh"
#include "kernels/layer/linear/linear_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kLoads = 8;  // in flight per lane
// Rows of a warp share what is read of x; but few rows must be spread over as many warps as there
// are.
constexpr int64_t kFewRows = 8192;

// Weights pass once: they need no place in L1.
__device__ __forceinline__ uint4 LoadOnce(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}

template <HalfType kType>
__device__ __forceinline__ float Dot8(const uint4& a, const uint4& b) {
  const uint32_t u[4] = {a.x, a.y, a.z, a.w}, v[4] = {b.x, b.y, b.z, b.w};
  float sum = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 p = UnpackPair<kType>(u[e]), q = UnpackPair<kType>(v[e]);
    sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
  }
  return sum;
}

template <HalfType kType, int kRows>
__global__ void __launch_bounds__(kThreads)
    GemvKernel(const uint4* x, const uint4* w, const float* bias, int pieces, int64_t out,
               bool accumulate, float* y) {
  constexpr int kAhead = kLoads / kRows;
  const int lane = threadIdx.x % 32;
  const int64_t row = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * kRows;
  if (row >= out) return;  // out is a multiple of kRows: all rows are there or none
  const uint4* rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = w + (row + r) * pieces;
  float sum[kRows] = {};
  int c = lane;
  for (; c + 32 * (kAhead - 1) < pieces; c += 32 * kAhead) {
    uint4 weights[kRows][kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) weights[r][i] = LoadOnce(rows[r] + c + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint4 values = __ldg(x + c + 32 * i);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sum[r] += Dot8<kType>(weights[r][i], values);
    }
  }
  for (; c < pieces; c += 32) {
    const uint4 values = __ldg(x + c);
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] += Dot8<kType>(LoadOnce(rows[r] + c), values);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    for (int step = 16; step > 0; step /= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], step);
  }
  if (lane >= kRows) return;
  float value = lane == 0 ? sum[0] : sum[kRows - 1];
  if (bias != nullptr) value += bias[row + lane];
  if (accumulate) value += y[row + lane];
  y[row + lane] = value;
}

template <HalfType kType, int kRows>
void LaunchRows(const LinearCudaParams& p, cudaStream_t stream) {
  constexpr int64_t kBlockRows = kWarps * kRows;
  const auto blocks = static_cast<unsigned>((p.out + kBlockRows - 1) / kBlockRows);
  GemvKernel<kType, kRows><<<blocks, kThreads, 0, stream>>>(
      static_cast<const uint4*>(p.x), static_cast<const uint4*>(p.w), p.bias,
      static_cast<int>(p.in / 8), p.out, p.accumulate, p.y);
}

template <HalfType kType>
void Launch(const LinearCudaParams& p, cudaStream_t stream) {
  if (p.out <= kFewRows) {
    LaunchRows<kType, 1>(p, stream);
  } else {
    LaunchRows<kType, 2>(p, stream);
  }
}

}  // namespace

cudaError_t GemvCuda(const LinearCudaParams& p, cudaStream_t stream) {
  if (p.n != 1 || p.in < 8 || p.in % 8 != 0 || p.out < 2 || p.out % 2 != 0) {
    return cudaErrorInvalidValue;
  }
  if (p.type == HalfType::kBf16) {
    Launch<HalfType::kBf16>(p, stream);
  } else {
    Launch<HalfType::kF16>(p, stream);
  }
  return cudaGetLastError();
}

}  // namespace carrel::kernels
