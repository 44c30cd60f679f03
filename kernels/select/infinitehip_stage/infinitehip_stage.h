// What:   one stage of hierarchical pruning for all KV heads, on the GPU: of the ranges of rows
//         that came through the stage before, the chunks whose representatives score best.
// Math:   the score of a row is the maximum over the group's queries of <q, k>, fp32 sums. Each
//         range is cut into chunks of `chunk` rows (its last may be short). In each chunk a descent
//         picks a representative: split in two, compare the middle rows of the halves, go into the
//         better (the left one if equal), until one row is left. The wanted / chunk chunks whose
//         representatives score best go on, ties by smaller row. If the ranges hold no more than
//         `wanted` rows, they go on as they are.
// Source: InfiniteHiP (docs/methods.md), section 3, appendix A, for one query block; the same as
//         decoder/select/infinite_hip_selector.h.
// Shapes: q [kv_heads * group, head_dim] bf16; k [kv_heads, row_stride, head_dim] bf16, in device
//         or pinned host memory; in [kv_heads, in_stride] ranges (first row, last row + 1;
//         ascending), of which in_count[g] count, none empty or longer than in_rows; or null: the
//         whole of 0 .. rows. out [kv_heads, out_stride] ranges and out_count alike. ids [kv_heads,
//         ids_stride] int32, the rows of `out`, and row_count [kv_heads], how many; or null.
//         head_dim 64 or 128; group 1 .. 16; chunk <= wanted; q and k at multiples of 16 bytes.
// Edge:   keys are finite. No rows: nothing is enqueued.
// Errors: InvalidValue for a shape that is not served; out_stride below InfiniteHipMostRanges.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   2 log2(chunk) keys per chunk, four chunks to a warp; one launch, which may be captured in
//         a graph. The last block of a KV head chooses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct InfiniteHipRange {
  int32_t begin, end;
};

struct InfiniteHipStageParams {
  const Bf16* q = nullptr;
  KvView kv;  // keys
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  int64_t rows = 0;
  const InfiniteHipRange* in = nullptr;
  const int32_t* in_count = nullptr;
  int64_t in_stride = 0;  // most ranges
  int64_t in_rows = 0;    // of a range, at most
  int64_t chunk = 0;
  int64_t wanted = 0;
  InfiniteHipRange* out = nullptr;
  int32_t* out_count = nullptr;
  int64_t out_stride = 0;
  int32_t* ids = nullptr;
  int64_t ids_stride = 0;
  int32_t* row_count = nullptr;
  void* workspace = nullptr;  // InfiniteHipStageWorkspaceBytes
};

// Ranges that a stage may let through.
int64_t InfiniteHipMostRanges(const InfiniteHipStageParams& params);
// Zeroed once before its first use; every call leaves it ready for the next, of whatever stage with
// the same kv_heads. One call at a time.
size_t InfiniteHipStageWorkspaceBytes(const InfiniteHipStageParams& params);
cudaError_t InfiniteHipStage(const InfiniteHipStageParams& params, cudaStream_t stream);
void RefInfiniteHipStage(const InfiniteHipStageParams& params);  // host pointers; fp64 sums

}  // namespace carrel::kernels
