#include "kernels/encode/row_sum/row_sum.h"
#include "kernels/launch-inl.cuh"
#include "kernels/mma-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 256;

// Grid: (parts, kv_heads). A thread adds up 8 columns of every kRows-th row.
template <int kDim>
__global__ void __launch_bounds__(kThreads) RowSumKernel(const RowSumParams p) {
  constexpr int kColumns = kDim / 8, kRows = kThreads / kColumns;
  __shared__ float partial[kRows][kDim];
  const int64_t head = blockIdx.y, part = blockIdx.x;
  const int64_t share = (p.rows + p.parts - 1) / p.parts;
  const int64_t first = part * share, last = min(p.rows, first + share);
  const int column = threadIdx.x % kColumns, row = threadIdx.x / kColumns;
  float sum[8] = {};
  for (int64_t j = first + row; j < last; j += kRows) {
    const uint4 x = LoadStream16(p.x + (head * p.row_stride + j) * kDim + 8 * column);
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) partial[row][8 * column + i] = sum[i];
  __syncthreads();
  for (int c = threadIdx.x; c < kDim; c += kThreads) {
    float total = 0;
    for (int r = 0; r < kRows; ++r) total += partial[r][c];
    p.sums[(head * p.parts + part) * kDim + c] = total;
  }
}

}  // namespace

cudaError_t RowSum(const RowSumParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.rows < 0 || p.rows > p.row_stride || p.parts < 1 ||
      p.parts > 65535 || (p.head_dim != 64 && p.head_dim != 128)) {
    return cudaErrorInvalidValue;
  }
  return Launch({.grid = GridOf(p.parts, p.kv_heads), .threads = kThreads}, stream,
                p.head_dim == 64 ? RowSumKernel<64> : RowSumKernel<128>, p);
}

}  // namespace carrel::kernels
