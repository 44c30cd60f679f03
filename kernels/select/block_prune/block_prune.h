// What:   InfiniteHiP's hierarchical pruning in prefill, on the GPU: for every block of queries and
//         every KV head the rows that the block chooses from what came before it.
// Math:   GatherBlockQueries: the queries of a block's last token and of every stride_q-th before it,
//         all q heads of the KV head; turned, if a table is given, by s = first - zone_end + 1 for
//         `right`, by s + 1 for `left`: relative-style positions (model/rope_mode.h).
//         StartBlockPrune: the whole zone of each block.
//         BlockPrune: one stage. The score of a row is the maximum over the block's queries of
//         <q, k>, fp32 sums. What a unit has is cut into chunks of `chunk` rows; in each a descent
//         picks a representative: split in two, compare the middle rows of the halves (the earlier by
//         the left queries, the later by the right ones), go into the better, until one row is left;
//         the wanted / chunk chunks whose representatives score best go on, ties by smaller row. With
//         a table, the key of a chunk that stands c chunks before the last is turned back by s + c,
//         rounded to bf16, and meets the right queries alone: chunk-indexed positions. What holds no
//         more than `wanted` rows goes on as it is.
// Source: InfiniteHiP (docs/methods.md), section 3, appendices A and D; the same as
//         prefill/sparse_attention.h with kernels/select/chunk_prune.
// Shapes: q [layout.n, kv_heads * group, head_dim] bf16; right, left [units, queries, head_dim] bf16,
//         queries = BlockQueries(..) <= 256; left null: right is meant. k [kv_heads, row_stride, head_dim]
//         bf16. scores [units, ceil(max_rows / chunk)]. head_dim 64 or 128; all but
//         heads at multiples of 16 bytes. chunk divides the length of the stretches that come in, or
//         there is one.
// Edge:   an empty zone chooses nothing. No blocks: nothing is enqueued.
// Errors: InvalidValue for a shape that is not served; out.stride below BlockPruneMostChunks.
// Threads: reentrant, each call with scores of its own; only enqueues.
// Cost:   per unit 2 log2(chunk) keys of 128 or 256 bytes per chunk, 16 chunks to a warp, each key
//         against all queries on the tensor cores. Blocks that run at once visit the same chunks, so
//         that most keys come from L2.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/block_layout.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

inline int64_t BlockQueries(int64_t block_q, int64_t stride_q, int64_t group) {
  return (block_q + stride_q - 1) / stride_q * group;
}

struct BlockQueriesParams {
  BlockLayout layout = {};
  const Bf16* q = nullptr;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  int64_t stride_q = 0;
  TurnTable table = {};  // without angles: as they are
  Bf16* right = nullptr;
  Bf16* left = nullptr;  // may be null
};
cudaError_t GatherBlockQueries(const BlockQueriesParams& params, cudaStream_t stream);
void RefGatherBlockQueries(const BlockQueriesParams& params);  // host pointers

// out.stride >= 1.
cudaError_t StartBlockPrune(const BlockLayout& layout, int64_t kv_heads, const ChosenRows& out,
                            cudaStream_t stream);
void RefStartBlockPrune(const BlockLayout& layout, int64_t kv_heads, const ChosenRows& out);

struct BlockPruneParams {
  BlockLayout layout = {};
  const Bf16* right = nullptr;
  const Bf16* left = nullptr;
  int64_t queries = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  KvView kv;             // keys
  TurnTable table = {};  // with angles: chunk-indexed positions
  ChosenRows in = {};
  int64_t max_rows = 0;  // of any unit
  int64_t chunk = 0;
  int64_t wanted = 0;
  ChosenRows out = {};
  uint32_t* scores = nullptr;
};
int64_t BlockPruneMostChunks(const BlockPruneParams& params);  // that may go on
cudaError_t BlockPrune(const BlockPruneParams& params, cudaStream_t stream);
void RefBlockPrune(const BlockPruneParams& params);  // host pointers; fp64 sums; scores unused

}  // namespace carrel::kernels
