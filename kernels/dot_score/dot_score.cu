// Q is A of the tensor cores, rows are B: a warp takes 16 rows at a time, straight from memory.
#include <algorithm>

#include "kernels/dot_score/dot_score_cuda.h"
#include "kernels/mma-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kTile = 16;
constexpr int kBlockRows = kWarps * kTile * 8;

template <int kDim, bool kWide>
__global__ void __launch_bounds__(kWarps * 32) DotScoreKernel(const DotScoreCudaParams p) {
  constexpr int kLoads = kDim / 32;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = static_cast<int>(p.group);
  const int64_t head = blockIdx.y;
  const uint16_t* q = p.q + head * group * kDim + 8 * t;
  uint4 low[kLoads], high[kLoads];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const uint4 none{0, 0, 0, 0};
    low[j] = g < group ? LoadStream16(q + g * kDim + 32 * j) : none;
    high[j] = kWide && g + 8 < group ? LoadStream16(q + (g + 8) * kDim + 32 * j) : none;
  }
  const uint16_t* k = p.k + head * p.row_stride * kDim + 8 * t;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kBlockRows;
  const int64_t end = min(p.rows, begin + kBlockRows);
  for (int64_t tile = begin + threadIdx.x / 32 * kTile; tile < end; tile += kWarps * kTile) {
    uint4 x[2][kLoads];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int64_t row = min(tile + 8 * i + g, end - 1);
      if (p.ids != nullptr) row = __ldg(p.ids + head * p.ids_stride + row);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) x[i][j] = LoadStream16(k + row * kDim + 32 * j);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float c[4] = {};
#pragma unroll
      for (int j = 0; j < kLoads; ++j) MmaPair(c, low[j], high[j], x[i][j]);
      const int64_t row = tile + 8 * i + 2 * t;
#pragma unroll
      for (int s = 0; s < (kWide ? 2 : 1); ++s) {
        if (g + 8 * s >= group) continue;
        float* at = p.scores + (head * group + g + 8 * s) * p.score_stride + row;
        if (row < end) at[0] = p.scale * c[2 * s];
        if (row + 1 < end) at[1] = p.scale * c[2 * s + 1];
      }
    }
  }
}

}  // namespace

cudaError_t DotScoreCuda(const DotScoreCudaParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > 16 || p.rows < 0 ||
      (p.head_dim != 64 && p.head_dim != 128) || p.rows > p.score_stride ||
      p.rows > (p.ids == nullptr ? p.row_stride : p.ids_stride)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const bool wide = p.group > 8;
  const auto kernel = p.head_dim == 64
                          ? (wide ? DotScoreKernel<64, true> : DotScoreKernel<64, false>)
                          : (wide ? DotScoreKernel<128, true> : DotScoreKernel<128, false>);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((p.rows + kBlockRows - 1) / kBlockRows),
                        static_cast<unsigned>(p.kv_heads));
  config.blockDim = dim3(kWarps * 32);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace carrel::kernels
