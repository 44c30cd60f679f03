// Rows are A of the tensor cores, 32 to a warp; directions are B, once per block in shared memory
// in the order in which lanes take them. A quad of lanes then holds the signs of two rows and joins
// them into words by two shuffles.
#include <algorithm>

#include "kernels/encode/hash_encode/hash_encode.h"
#include "kernels/launch-inl.cuh"
#include "kernels/mma-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kWarpRows = 32;
constexpr int kBlockRows = 2048;
constexpr int kFewRows = 256;

// Grid: (blocks of rows, kv_heads, parts of the bits: each word if there are few rows).
template <int kDim, int kBits, bool kFew>
__global__ void __launch_bounds__(kWarps * 32, 2) HashEncodeKernel(const HashEncodeParams p) {
  constexpr int kLoads = kDim / 32, kWords = kBits / 32, kBlockWords = kFew ? 1 : kWords;
  extern __shared__ uint4 directions[];  // [kBlockWords * 4, kLoads, 32 lanes]
  const int first_word = kFew ? blockIdx.z : 0;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t head = blockIdx.y;
  const auto* thresholds =
      p.threshold == nullptr
          ? nullptr
          : reinterpret_cast<const float2*>(p.threshold + head * kBits + 32 * first_word);

  const uint16_t* matrix = p.matrix + (head * kBits + 32 * first_word) * kDim;
  for (int i = threadIdx.x / 32; i < kBlockWords * 4 * kLoads; i += kWarps) {
    directions[i * 32 + lane] =
        LoadStream16(matrix + (i / kLoads * 8 + g) * kDim + i % kLoads * 32 + 8 * t);
  }
  __syncthreads();

  const int64_t block_begin = static_cast<int64_t>(blockIdx.x) * kBlockRows;
  const int64_t end = min(p.rows, block_begin + kBlockRows);
  for (int64_t first = block_begin + threadIdx.x / 32 * kWarpRows; first < end;
       first += kWarps * kWarpRows) {
    uint4 x[4][kLoads];  // rows g, g + 8, g + 16, g + 24
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = min(first + g + 8 * r, end - 1);
      const uint16_t* at = p.x + (head * p.row_stride + row) * kDim + 8 * t;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) x[r][j] = LoadStream16(at + 32 * j);
    }
#pragma unroll 1  // unrolled, it spills
    for (int w = 0; w < kBlockWords; ++w) {
      uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float low[4] = {}, high[4] = {};
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const uint4 b = directions[((4 * w + n) * kLoads + j) * 32 + lane];
          MmaPair(low, x[0][j], x[1][j], b);
          MmaPair(high, x[2][j], x[3][j], b);
        }
        float2 bound{0, 0};
        if (thresholds != nullptr) bound = __ldg(thresholds + (32 * w + 8 * n + 2 * t) / 2);
        const auto signs = [&](float first_bit, float second_bit) {
          const uint32_t pair = (first_bit > bound.x ? 1u : 0u) | (second_bit > bound.y ? 2u : 0u);
          return pair << (8 * n + 2 * t);
        };
        word[0] |= signs(low[0], low[1]);
        word[1] |= signs(low[2], low[3]);
        word[2] |= signs(high[0], high[1]);
        word[3] |= signs(high[2], high[3]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        word[r] |= __shfl_xor_sync(~0u, word[r], 1);
        word[r] |= __shfl_xor_sync(~0u, word[r], 2);
        // One lane of the quad per word, so that words leave side by side.
        const int64_t row = first + g + 8 * r;
        if (w % 4 == t && row < end) {
          p.codes[(head * p.code_stride + row) * kWords + first_word + w] = word[r];
        }
      }
    }
  }
}

template <int kDim, bool kFew>
auto KernelOf(int64_t bits) {
  return bits == 64    ? HashEncodeKernel<kDim, 64, kFew>
         : bits == 128 ? HashEncodeKernel<kDim, 128, kFew>
                       : HashEncodeKernel<kDim, 256, kFew>;
}

}  // namespace

cudaError_t HashEncode(const HashEncodeParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.rows < 0 || p.rows > p.row_stride ||
      p.rows > p.code_stride || (p.head_dim != 64 && p.head_dim != 128) ||
      (p.bits != 64 && p.bits != 128 && p.bits != 256)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  // Few rows: the matrix is what there is to read, and blocks share it.
  const bool few = p.rows <= kFewRows;
  const int64_t parts = few ? p.bits / 32 : 1;
  const auto kernel = p.head_dim == 64
                          ? (few ? KernelOf<64, true>(p.bits) : KernelOf<64, false>(p.bits))
                          : (few ? KernelOf<128, true>(p.bits) : KernelOf<128, false>(p.bits));
  const int64_t shared = p.bits / parts * p.head_dim * 2;
  RETURN_IF_FAILED(AllowShared(kernel, shared));
  return Launch({.grid = GridOf((p.rows + kBlockRows - 1) / kBlockRows, p.kv_heads, parts),
                 .threads = kWarps * 32,
                 .shared_bytes = shared},
                stream, kernel, p);
}

}  // namespace carrel::kernels
