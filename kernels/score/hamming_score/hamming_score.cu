#include <algorithm>
#include <type_traits>

#include "kernels/score/hamming_score/group_code-inl.cuh"
#include "kernels/score/hamming_score/hamming_score.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 512;
// Rows of a block: enough to hide its start, few enough that short inputs reach every SM.
constexpr int64_t kMinBlockRows = 4 * kThreads, kMaxBlockRows = 16 * kThreads;
constexpr int64_t kBlocks = 512;

template <int kWords, int kPlanes>
__global__ void __launch_bounds__(kThreads, 2)
    HammingScoreKernel(const HammingScoreParams p, int block_rows) {
  __shared__ GroupCode<kWords, kPlanes> group;
  const int64_t head = blockIdx.y;
  const uint32_t* codes = p.codes + head * p.code_stride * kWords;
  uint16_t* scores = p.scores + head * p.score_stride;
  const int begin = blockIdx.x * block_rows;
  const int end = static_cast<int>(min(p.rows, static_cast<int64_t>(begin) + block_rows));
  const int first = begin + static_cast<int>(threadIdx.x);
  CodeRound<kWords> round;
  round.Load(codes, first, end, kThreads);
  group.Make(p.queries + head * p.group * kWords, static_cast<int>(p.group));
  const GroupCode<kWords, kPlanes> in_registers = group;
  ForEachCode<kWords>(round, codes, first, end, kThreads,
                      [&](int j, const uint32_t(&code)[kWords]) {
                        scores[j] = static_cast<uint16_t>(in_registers.Score(code));
                      });
}

}  // namespace

cudaError_t HammingScore(const HammingScoreParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > kMaxHammingGroup ||
      (p.bits != 64 && p.bits != 128 && p.bits != 256) || p.rows < 0 || p.rows > p.code_stride ||
      p.rows > p.score_stride || p.rows > INT32_MAX - 2 * kMaxBlockRows) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const int64_t share = p.rows * p.kv_heads / kBlocks / kMinBlockRows * kMinBlockRows;
  const int64_t block_rows = std::clamp(share, kMinBlockRows, kMaxBlockRows);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((p.rows + block_rows - 1) / block_rows),
                        static_cast<unsigned>(p.kv_heads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return WithGroupCode(p.bits, p.group, [&](auto words, auto planes) {
    return cudaLaunchKernelEx(&config,
                              HammingScoreKernel<decltype(words)::value, decltype(planes)::value>,
                              p, static_cast<int>(block_rows));
  });
}

}  // namespace carrel::kernels
