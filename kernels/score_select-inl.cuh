// Selection among scores of 16 bits by the blocks of a KV head, all of which are resident together:
// how rows are shared out, where a block keeps its scores, the launch, and which ids are taken.
// What scores are and how they are counted is the kernel's own (code_topk, group_topk,
// hamming_topk).
#pragma once

#include <algorithm>

#include "kernels/launch-inl.cuh"
#include "kernels/select-inl.cuh"

namespace carrel::kernels {

inline constexpr int kScoreItems = 8;  // that a lane looks at together: 16 bytes

struct ScorePlanShape {
  int64_t rows = 0, kv_heads = 0;
  int64_t sequences = 1;         // of the launch, none with more rows
  int64_t least_block_rows = 0;  // a block for fewer is not worth its barrier
  int blocks_per_sm = 1;
  size_t count_bytes = 0;   // of a block's dynamic shared memory, before its scores
  size_t static_bytes = 0;  // of its static arrays, and what the system takes
  size_t published = 0;     // numbers that a block publishes
};

struct ScorePlan {
  int64_t blocks = 1;  // of a KV head
  int64_t share = 0;   // rows of a block, a multiple of kScoreItems
  bool in_shared = true;
  size_t shared_bytes = 0;
  size_t published = 0, scores = 0, bytes = 0;  // offsets in the workspace, and its size
};

// Of the current device.
inline int64_t ResidentBlocks(int64_t blocks_per_sm) { return Multiprocessors() * blocks_per_sm; }

inline int64_t ScoreShare(int64_t rows, int64_t blocks) {
  return ((rows + blocks - 1) / blocks + kScoreItems - 1) / kScoreItems * kScoreItems;
}

// The same for the same shape on the same device.
inline ScorePlan PlanScores(const ScorePlanShape& shape) {
  int device = 0, sms = 1, shared = 0;
  if (cudaGetDevice(&device) == cudaSuccess) {
    static_cast<void>(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    static_cast<void>(cudaDeviceGetAttribute(&shared,
                                             shape.blocks_per_sm == 1
                                                 ? cudaDevAttrMaxSharedMemoryPerBlockOptin
                                                 : cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                             device));
  }
  const auto round_up = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  ScorePlan plan;
  plan.blocks =
      std::clamp<int64_t>((shape.rows + shape.least_block_rows - 1) / shape.least_block_rows, 1,
                          std::max<int64_t>(1, int64_t{sms} * shape.blocks_per_sm /
                                                   (shape.kv_heads * shape.sequences)));
  plan.share = ScoreShare(shape.rows, plan.blocks);
  const size_t scores = static_cast<size_t>(plan.share) * sizeof(uint16_t);
  plan.in_shared = scores + shape.count_bytes + shape.static_bytes <=
                   static_cast<size_t>(shared / shape.blocks_per_sm);
  plan.shared_bytes = shape.count_bytes + (plan.in_shared ? scores : 0);
  plan.published = round_up(static_cast<size_t>(shape.kv_heads) * sizeof(RowSync));
  const auto blocks = static_cast<size_t>(shape.kv_heads * plan.blocks);
  plan.scores = plan.published + round_up(blocks * shape.published * sizeof(unsigned));
  plan.bytes = plan.scores + (plan.in_shared ? 0 : blocks * scores);
  return plan;
}

// What a kernel is told of its plan.
struct ScoreRows {
  RowSync* sync;        // [kv_heads]
  unsigned* published;  // [kv_heads, blocks, numbers]
  uint16_t* scores;     // [kv_heads, blocks, share], or null: in shared memory
  int rows, share, k, blocks;

  ScoreRows() = default;
  ScoreRows(const ScorePlan& plan, void* workspace, int64_t rows_, int64_t k_)
      : sync(static_cast<RowSync*>(workspace)),
        published(reinterpret_cast<unsigned*>(static_cast<uint8_t*>(workspace) + plan.published)),
        scores(plan.in_shared
                   ? nullptr
                   : reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(workspace) + plan.scores)),
        rows(static_cast<int>(rows_)),
        share(static_cast<int>(plan.share)),
        k(static_cast<int>(std::min(k_, rows_))),
        blocks(static_cast<int>(plan.blocks)) {}

  // Of this block; grid: (blocks, kv_heads, sequences).
  __device__ int begin() const { return min(rows, static_cast<int>(blockIdx.x) * share); }
  __device__ int end() const { return min(rows, begin() + share); }
  __device__ uint16_t* OfBlock(void* shared) const {
    return scores == nullptr
               ? static_cast<uint16_t*>(shared)
               : scores + (static_cast<int64_t>(blockIdx.y) * blocks + blockIdx.x) * share;
  }
};

// scores: of the rows [begin, end). ids [k]: first the rows above the threshold, then those equal
// to it. above_before: rows above it in blocks before this one; equal_first: where this block's
// equal rows go.
template <int kThreads>
__device__ void TakeScores(const uint16_t* scores, int begin, int end, unsigned threshold,
                           unsigned above_before, unsigned equal_first, int k, int32_t* ids) {
  const auto load = [&](int j) { return *reinterpret_cast<const uint4*>(scores + (j - begin)); };
  TakeSelected<kThreads, kScoreItems>(
      begin, end, threshold,
      [&](int j, unsigned(&of_lane)[kScoreItems]) {
        const uint4 x = load(j);
        const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_lane[2 * i] = words[i] & 0xffff;
          of_lane[2 * i + 1] = words[i] >> 16;
        }
      },
      [&](int j) {
        const uint4 x = load(j);
        const unsigned pair = __vmaxu2(__vmaxu2(x.x, x.y), __vmaxu2(x.z, x.w));
        return max(pair & 0xffff, pair >> 16);
      },
      [&](bool above, unsigned rank, int j) {
        const unsigned at = (above ? above_before : equal_first) + rank;
        if (at < static_cast<unsigned>(k)) ids[at] = j;
      });
}

// All blocks of the grid resident together; a single one of each row needs no such promise.
template <class Args>
cudaError_t LaunchTogether(void (*kernel)(Args), dim3 grid, int threads, size_t shared_bytes,
                           const Args& args, cudaStream_t stream) {
  RETURN_IF_FAILED(AllowShared(kernel, static_cast<int64_t>(shared_bytes)));
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = grid.x > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace carrel::kernels
