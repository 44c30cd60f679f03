#include <algorithm>
#include <type_traits>

#include "kernels/hamming_score/group_code-inl.cuh"
#include "kernels/hamming_topk/hamming_topk.h"
#include "kernels/select-inl.cuh"

namespace carrel::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksPerSm = 2;
constexpr int kMinBlockRows = 4 * kThreads;
constexpr int kItems = 8;  // scores that a lane looks at together: 16 bytes

struct Plan {
  int64_t blocks = 1;  // of a KV head
  int64_t share = 0;   // rows of a block, a multiple of kItems
  int64_t bins = 0;
  int64_t copies = 1, copy_stride = 0;
  bool in_shared = true;
  size_t shared_bytes = 0;
  // Offsets in the workspace.
  size_t published = 0, scores = 0, bytes = 0;
};

struct Args {
  HammingTopKParams p;
  RowSync* sync;        // [kv_heads]
  unsigned* published;  // [kv_heads, blocks, bins + 1]
  uint16_t* scores;     // [kv_heads, blocks, share], or null: in shared memory
  int share, bins, k;
  int copies, copy_stride;  // of the histogram; copies is a power of two
};

size_t RoundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The same for the same shape on the same device.
Plan PlanOf(const HammingTopKParams& p) {
  int device = 0, sms = 1, shared = 0;
  if (cudaGetDevice(&device) == cudaSuccess) {
    static_cast<void>(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    static_cast<void>(
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  }
  Plan plan;
  plan.blocks = std::clamp<int64_t>((p.rows + kMinBlockRows - 1) / kMinBlockRows, 1,
                                    std::max<int64_t>(1, sms * kBlocksPerSm / p.kv_heads));
  plan.share = ((p.rows + plan.blocks - 1) / plan.blocks + kItems - 1) / kItems * kItems;
  plan.bins = p.group * p.bits / (p.group % 2 == 0 ? 2 : 1) + 1;
  // Scores crowd around their mean: lanes that count into copies of their own collide less.
  plan.copies = plan.bins <= 520 ? 4 : 1;
  const size_t published = (static_cast<size_t>(plan.bins) + 1) * sizeof(unsigned);
  // Copies begin a quarter of the banks apart.
  plan.copy_stride = (plan.bins + 31) / 32 * 32 + 8;
  const size_t counts =
      static_cast<size_t>(plan.copies * plan.copy_stride) * sizeof(unsigned) + published;
  const size_t scores = static_cast<size_t>(plan.share) * sizeof(uint16_t);
  // A block's static arrays, and what the system takes of each.
  constexpr size_t kReserved = 4608;
  const size_t room = static_cast<size_t>(shared) / kBlocksPerSm;
  plan.in_shared = scores + counts + 16 + kReserved <= room;
  plan.shared_bytes = (plan.in_shared ? scores : 0) + counts;
  plan.published = RoundUp(static_cast<size_t>(p.kv_heads) * sizeof(RowSync));
  plan.scores = plan.published + RoundUp(static_cast<size_t>(p.kv_heads * plan.blocks) * published);
  plan.bytes =
      plan.scores + (plan.in_shared ? 0 : static_cast<size_t>(p.kv_heads * plan.blocks) * scores);
  return plan;
}

// All threads; synchronises before and after.
__device__ void SumCopies(const unsigned* counts, const Args& a, unsigned* sums) {
  __syncthreads();
  for (int t = threadIdx.x; t < a.bins; t += kThreads) {
    unsigned sum = counts[t];
    for (int c = 1; c < a.copies; ++c) sum += counts[c * a.copy_stride + t];
    sums[t] = sum;
  }
  __syncthreads();
}

// Grid: (blocks, kv_heads).
template <int kWords, int kPlanes>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) HammingTopKKernel(const Args a) {
  extern __shared__ __align__(16) uint8_t dynamic[];  // scores, if they are here; then counts
  __shared__ GroupCode<kWords, kPlanes> group;
  __shared__ int shared_bar;
  AllowNextLaunch();  // every block is resident: what begins early takes no place from them
  const int head = blockIdx.y, block = blockIdx.x, blocks = gridDim.x;
  const unsigned generation = Generation(a.sync + head);
  uint16_t* scores = a.scores == nullptr
                         ? reinterpret_cast<uint16_t*>(dynamic)
                         : a.scores + (static_cast<int64_t>(head) * blocks + block) * a.share;
  auto* counts = reinterpret_cast<unsigned*>(dynamic + (a.scores == nullptr ? 2 * a.share : 0));
  // The histogram's copies, then their sum.
  unsigned* sums = counts + a.copies * a.copy_stride;
  for (int t = threadIdx.x; t < a.copies * a.copy_stride; t += kThreads) counts[t] = 0;
  if (threadIdx.x == 0) shared_bar = 0;

  const int rows = static_cast<int>(a.p.rows);
  const int begin = min(rows, block * a.share), end = min(rows, begin + a.share);
  const uint32_t* codes = a.p.codes + head * a.p.code_stride * kWords;
  const int first = begin + static_cast<int>(threadIdx.x);
  CodeRound<kWords> round;
  round.Load(codes, first, end, kThreads);
  group.Make(a.p.queries + head * a.p.group * kWords, static_cast<int>(a.p.group));
  {
    const GroupCode<kWords, kPlanes> in_registers = group;
    unsigned* own_counts = counts + (threadIdx.x & (a.copies - 1)) * a.copy_stride;
    int bar = 0;
    const auto take = [&](int j, const uint32_t(&code)[kWords]) {
      const int score = in_registers.HalvedScore(code);
      scores[j - begin] = static_cast<uint16_t>(score);
      if (score >= bar) atomicAdd(&own_counts[score], 1u);
    };
    // The k-th score of a part is no more than that of the whole: once k keys have been counted,
    // what lies below the k-th of them need not be. Most keys do.
    const int checkpoint = begin + (end - begin) / 4 / kThreads * kThreads;
    if (checkpoint - begin < 2 * a.k) {
      ForEachCode<kWords>(round, codes, first, end, kThreads, take);
    } else {
      ForEachCode<kWords>(round, codes, first, checkpoint, kThreads, take);
      const int next = checkpoint + static_cast<int>(threadIdx.x);
      round.Load(codes, next, end, kThreads);
      SumCopies(counts, a, sums);
      SuffixSums<kThreads>(sums, a.bins);
      for (int t = threadIdx.x; t < a.bins; t += kThreads) {
        if (sums[t] >= static_cast<unsigned>(a.k) && sums[t + 1] < static_cast<unsigned>(a.k)) {
          shared_bar = t;
        }
      }
      __syncthreads();
      bar = shared_bar;
      ForEachCode<kWords>(round, codes, next, end, kThreads, take);
    }
  }
  SumCopies(counts, a, sums);

  const Threshold t =
      FindThreshold<kThreads>(sums, counts, a.bins, static_cast<unsigned>(a.k),
                              a.published + static_cast<int64_t>(head) * blocks * (a.bins + 1),
                              a.sync + head, generation, block, blocks);
  int32_t* ids = a.p.ids + head * a.p.k;
  const auto load = [&](int j) { return *reinterpret_cast<const uint4*>(scores + (j - begin)); };
  TakeSelected<kThreads, kItems>(
      begin, end, t.digit,
      [&](int j, unsigned(&keys)[kItems]) {
        const uint4 x = load(j);
        const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          keys[2 * i] = words[i] & 0xffff;
          keys[2 * i + 1] = words[i] >> 16;
        }
      },
      [&](int j) {
        const uint4 x = load(j);
        const unsigned pair = __vmaxu2(__vmaxu2(x.x, x.y), __vmaxu2(x.z, x.w));
        return max(pair & 0xffff, pair >> 16);
      },
      [&](bool above, unsigned rank, int j) {
        const unsigned at = above ? t.above_before + rank : t.above + t.equal_before + rank;
        if (at < static_cast<unsigned>(a.k)) ids[at] = j;
      });
}

}  // namespace

size_t HammingTopKWorkspaceBytes(const HammingTopKParams& params) {
  return params.rows == 0 ? 0 : PlanOf(params).bytes;
}

cudaError_t HammingTopK(const HammingTopKParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || p.group < 1 || p.group > kMaxHammingGroup ||
      (p.bits != 64 && p.bits != 128 && p.bits != 256) || p.rows < 0 || p.rows > p.code_stride ||
      p.rows >= 1 << 30 || p.k < 0) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0 || p.k == 0) return cudaSuccess;
  if (p.workspace == nullptr) return cudaErrorInvalidValue;
  const Plan plan = PlanOf(p);
  auto* bytes = static_cast<uint8_t*>(p.workspace);
  Args a;
  a.p = p;
  a.sync = reinterpret_cast<RowSync*>(bytes);
  a.published = reinterpret_cast<unsigned*>(bytes + plan.published);
  a.scores = plan.in_shared ? nullptr : reinterpret_cast<uint16_t*>(bytes + plan.scores);
  a.share = static_cast<int>(plan.share);
  a.bins = static_cast<int>(plan.bins);
  a.copies = static_cast<int>(plan.copies);
  a.copy_stride = static_cast<int>(plan.copy_stride);
  a.k = static_cast<int>(std::min(p.k, p.rows));
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(p.kv_heads));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = plan.blocks > 1 ? 1 : 0;
  return WithGroupCode(p.bits, p.group, [&](auto words, auto planes) {
    const auto kernel = HammingTopKKernel<decltype(words)::value, decltype(planes)::value>;
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(plan.shared_bytes));
    return error != cudaSuccess ? error : cudaLaunchKernelEx(&config, kernel, a);
  });
}

}  // namespace carrel::kernels
