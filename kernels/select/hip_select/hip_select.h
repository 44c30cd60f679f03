// What:   rows found by halving chunks, block by block, for all KV heads, on the GPU.
// Math:   of each KV head, `rows` keys are cut into blocks of block_k (the last may be short),
//         these into C = max(1, budget / block_k) equal chunks. Each round splits every chunk in
//         two, scores each branch by its middle block (maximum over its keys and the group's
//         queries of <q, k>, fp32 sums) and keeps the best C branches, ties by smaller row; it ends
//         when branches are blocks. ids: their rows, ascending, cut to the budget.
// Source: HiP Attention (docs/methods.md), section 3, algorithm 1, for one query block; the same as
//         decoder/select/hip_selector.h without ensemble and widening.
// Shapes: q [kv_heads * group, head_dim] bf16; k [kv_heads, row_stride, head_dim] bf16, in device
//         or pinned host memory; ids [kv_heads, ids_stride] int32; row_count [kv_heads] int32: how
//         many of them, at most budget. head_dim 64 or 128; group 1 .. 16; C <= kMaxHipBranches. q
//         and k at multiples of 16 bytes.
// Edge:   keys are finite. No rows: nothing is enqueued.
// Errors: InvalidValue for a shape that is not served, or more branches than fit the device's
//         shared memory.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   2 C block_k keys in each of log2(rows / budget) + 1 rounds, and a barrier of the KV
//         head's blocks; one cooperative launch, which may be captured in a graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

inline constexpr int64_t kMaxHipBranches = 4096;

struct HipSelectParams {
  const Bf16* q = nullptr;
  KvView kv;  // keys
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  int64_t rows = 0;
  int64_t block_k = 0;  // 1 .. 1024
  int64_t budget = 0;   // 1 .. ids_stride
  int32_t* ids = nullptr;
  int64_t ids_stride = 0;
  int32_t* row_count = nullptr;
  void* workspace = nullptr;  // HipSelectWorkspaceBytes
};

// Zeroed once before its first use; every call leaves it ready for the next with the same kv_heads.
// One call at a time.
size_t HipSelectWorkspaceBytes(int64_t kv_heads, int64_t block_k, int64_t budget);
cudaError_t HipSelect(const HipSelectParams& params, cudaStream_t stream);
void RefHipSelect(const HipSelectParams& params);  // host pointers; fp64 sums

}  // namespace carrel::kernels
