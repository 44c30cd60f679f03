// What:   how many bits of a key's code agree with the codes of the group's queries, for all keys, and
//         the k best keys of each KV head, in one launch; the scores never reach device memory while
//         they fit in the SMs.
// Math:   score[g, j] = sum_{h < group} (bits - popcount(query[g, h] xor code[g, j])); ids = the first
//         min(k, rows) keys when all are ordered by (score descending, index ascending).
//         As c_i of the group's queries have bit i set, the sum depends on a key's bit i alone: the
//         bit that most queries have gains |group - 2 c_i| over the other. These weights are split
//         into bit planes, so that a key costs one popcount per plane and word, not per query and
//         word: two planes for groups of 3, 4 and 6, three up to 8, four up to 16.
// Source: HATA (2025, section 3), score, sum over the group and top-k; planes and fusion are ours.
// Shapes: queries [kv_heads, group, bits / 32] uint32; codes [kv_heads, code_stride, bits / 32]
//         uint32, of which the first `rows` count; ids [kv_heads, k] int32. bits 64, 128 or 256;
//         group 1 .. 16; queries and codes at multiples of 16 bytes.
// Order:  not by score: first the keys above the k-th score, ascending, then those equal to it,
//         ascending. Attention does not mind, and neighbours lie together.
// Edge:   no rows or k == 0: nothing is enqueued; rows < k: places rows .. k - 1 are left as they
//         were.
// Errors: InvalidValue for a shape that is not served, more KV heads than SMs included.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads the codes once; one cooperative launch, which may be captured in a graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

struct HammingTopKParams {
  const uint32_t* queries = nullptr;
  const uint32_t* codes = nullptr;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t bits = 0;
  int64_t rows = 0;
  int64_t code_stride = 0;  // codes from one KV head to the next
  int64_t k = 0;
  int32_t* ids = nullptr;
  void* workspace = nullptr;  // HammingTopKWorkspaceBytes of these params
};

// Depends on kv_heads, group, bits and rows. Zeroed once before its first use; every call leaves it
// ready for the next with the same kv_heads. One call at a time.
size_t HammingTopKWorkspaceBytes(const HammingTopKParams& params);
cudaError_t HammingTopK(const HammingTopKParams& params, cudaStream_t stream);
// Host pointers: scores [kv_heads, rows].
void RefHammingScores(const HammingTopKParams& params, uint16_t* scores);

}  // namespace carrel::kernels
