#include <algorithm>
#include <type_traits>

#include "kernels/hamming_score/group_code-inl.cuh"
#include "kernels/hamming_score/hamming_score.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kBlockRows = kThreads * 32;

template <int kWords, int kPlanes>
__global__ void __launch_bounds__(kThreads, 2) HammingScoreKernel(const HammingScoreParams p) {
  __shared__ GroupCode<kWords, kPlanes> group;
  const int64_t head = blockIdx.y;
  group.Make(p.queries + head * p.group * kWords, static_cast<int>(p.group));
  const uint32_t* codes = p.codes + head * p.code_stride * kWords;
  uint16_t* scores = p.scores + head * p.score_stride;
  const int begin = blockIdx.x * kBlockRows;
  const int end = static_cast<int>(min(p.rows, static_cast<int64_t>(begin) + kBlockRows));
  const GroupCode<kWords, kPlanes> in_registers = group;
  ForEachCode<kWords>(codes, begin + static_cast<int>(threadIdx.x), end, kThreads,
                      [&](int j, const uint32_t(&code)[kWords]) {
                        scores[j] = static_cast<uint16_t>(in_registers.Score(code));
                      });
}

}  // namespace

cudaError_t HammingScore(const HammingScoreParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > kMaxHammingGroup ||
      (p.bits != 64 && p.bits != 128 && p.bits != 256) || p.rows < 0 || p.rows > p.code_stride ||
      p.rows > p.score_stride || p.rows > INT32_MAX - 2 * kBlockRows) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((p.rows + kBlockRows - 1) / kBlockRows),
                        static_cast<unsigned>(p.kv_heads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return WithGroupCode(p.bits, p.group, [&](auto words, auto planes) {
    return cudaLaunchKernelEx(
        &config, HammingScoreKernel<decltype(words)::value, decltype(planes)::value>, p);
  });
}

}  // namespace carrel::kernels
