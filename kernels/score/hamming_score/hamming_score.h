// What:   how many bits of a key's code agree with the codes of the group's queries, for all keys.
// Math:   out[g, j] = sum_{h < group} (bits - popcount(query[g, h] xor code[g, j])).
//         As c_i of the group's queries have bit i set, the sum depends on a key's bit i alone: the
//         bit that most queries have gains |group - 2 c_i| over the other. These weights are split
//         into bit planes, so that a key costs one popcount per plane and word, not per query and
//         word: two planes for groups of 3, 4 and 6, three up to 8, four up to 16.
// Source: HATA (2025, section 3): score and sum over the group. The planes are ours.
// Shapes: queries [kv_heads, group, bits / 32] uint32; codes [kv_heads, code_stride, bits / 32]
//         uint32, of which the first `rows` count; scores [kv_heads, score_stride] uint16.
//         bits 64, 128 or 256; group 1 .. 16; queries and codes at multiples of 16 bytes.
// Edge:   no rows: nothing is enqueued.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant.
// Cost:   reads the codes once; one launch, which may be captured in a graph.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"

namespace carrel::kernels {

struct HammingScoreParams {
  const uint32_t* queries = nullptr;
  const uint32_t* codes = nullptr;
  uint16_t* scores = nullptr;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t bits = 0;
  int64_t rows = 0;
  int64_t code_stride = 0;   // codes from one KV head to the next
  int64_t score_stride = 0;  // scores from one KV head to the next
};

cudaError_t HammingScore(const HammingScoreParams& params, cudaStream_t stream);
void RefHammingScore(const HammingScoreParams& params);  // host pointers

}  // namespace carrel::kernels
