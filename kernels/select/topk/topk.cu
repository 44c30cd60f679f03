#include <algorithm>

#include "kernels/score_select-inl.cuh"
#include "kernels/select/topk/topk_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = 2048;
constexpr int kMinBlockKeys = 4 * kThreads;
// The k-th largest in three steps: bits 31 .. 21, 20 .. 10 and 9 .. 0.
constexpr int kSteps = 3;
__device__ constexpr int kShift[kSteps] = {21, 10, 0};
__device__ constexpr unsigned kDigits[kSteps] = {2047, 2047, 1023};

struct Args {
  TopKCudaParams p;
  RowSync* sync;        // [kv_heads]
  unsigned* published;  // [kv_heads, kSteps, blocks, kBins + 1]
  int k;
};

// Grid: (blocks, kv_heads).
__global__ void __launch_bounds__(kThreads, 1) TopKKernel(const Args a) {
  __shared__ unsigned counts[kBins + 1];
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  RowSync* sync = a.sync + head;
  const auto* scores = reinterpret_cast<const float4*>(a.p.scores + head * a.p.score_stride);
  const int n = static_cast<int>(a.p.n);
  const int share = ((n + blocks - 1) / blocks + 3) / 4 * 4;
  const int begin = min(n, block * share), end = min(n, begin + share);
  const auto load = [&](int j, unsigned(&keys)[4]) {
    if (j + 4 <= n) {
      const float4 x = scores[j / 4];
      keys[0] = KeyOf(x.x);
      keys[1] = KeyOf(x.y);
      keys[2] = KeyOf(x.z);
      keys[3] = KeyOf(x.w);
    } else {
      for (int i = 0; i < 4; ++i) {
        keys[i] = j + i < n ? KeyOf(reinterpret_cast<const float*>(scores)[j + i]) : 0;
      }
    }
  };

  unsigned prefix = 0, above = 0, above_before = 0, equal_before = 0;
  for (int step = 0; step < kSteps; ++step) {
    for (int t = threadIdx.x; t < kBins; t += kThreads) counts[t] = 0;
    __syncthreads();
    const int shift = kShift[step];
    const unsigned digits = kDigits[step];
    const unsigned fixed = step == 0 ? 0 : ~0u << kShift[step - 1];
    // All loads of a round before the first count, which they must not wait for.
    constexpr int kLoads = 4, kRound = kLoads * 4 * kThreads;
    for (int base = begin + 4 * static_cast<int>(threadIdx.x); base < end; base += kRound) {
      unsigned keys[kLoads][4];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        if (base + 4 * kThreads * u < end) load(base + 4 * kThreads * u, keys[u]);
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool counts_here = base + 4 * kThreads * u + i < end;
          if (counts_here && (keys[u][i] & fixed) == prefix) {
            atomicAdd(&counts[keys[u][i] >> shift & digits], 1u);
          }
        }
      }
    }
    __syncthreads();
    const Threshold t = FindThreshold<kThreads>(
        counts, kBins, static_cast<unsigned>(a.k) - above,
        a.published + (static_cast<int64_t>(head) * kSteps + step) * blocks * (kBins + 1), sync,
        block, blocks);
    prefix |= t.digit << shift;
    above += t.above;
    above_before += t.above_before;
    equal_before = t.equal_before;
  }
  TakeSelected<kThreads, 4>(
      begin, end, prefix, load,
      [&](int j) {
        unsigned keys[4];
        load(j, keys);
        return max(max(keys[0], keys[1]), max(keys[2], keys[3]));
      },
      [&](bool is_above, unsigned rank, int j) {
        const unsigned at = is_above ? above_before + rank : above + equal_before + rank;
        if (at < static_cast<unsigned>(a.k)) a.p.ids[head * a.p.k + at] = j;
      });
}

// One block per SM, so that all are resident.
int64_t MostBlocks(int64_t kv_heads) {
  return std::max<int64_t>(1, ResidentBlocks(1) / std::max<int64_t>(1, kv_heads));
}

size_t SyncBytes(int64_t kv_heads) {
  return (static_cast<size_t>(kv_heads) * sizeof(RowSync) + 255) / 256 * 256;
}

}  // namespace

size_t TopKWorkspaceBytes(int64_t kv_heads) {
  return SyncBytes(kv_heads) + static_cast<size_t>(kv_heads * kSteps * MostBlocks(kv_heads)) *
                                   (kBins + 1) * sizeof(unsigned);
}

cudaError_t TopKCuda(const TopKCudaParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.n < 0 || p.n >= 1 << 30 || p.k < 0 ||
      p.n > p.score_stride || p.score_stride % 4 != 0 || p.workspace == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (p.n == 0 || p.k == 0) return cudaSuccess;
  Args a;
  a.p = p;
  a.k = static_cast<int>(std::min(p.k, p.n));
  auto* bytes = static_cast<uint8_t*>(p.workspace);
  a.sync = reinterpret_cast<RowSync*>(bytes);
  a.published = reinterpret_cast<unsigned*>(bytes + SyncBytes(p.kv_heads));
  const int64_t blocks =
      std::min(MostBlocks(p.kv_heads), (p.n + kMinBlockKeys - 1) / kMinBlockKeys);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.kv_heads));
  return LaunchTogether(TopKKernel, grid, kThreads, 0, a, stream);
}

}  // namespace carrel::kernels
