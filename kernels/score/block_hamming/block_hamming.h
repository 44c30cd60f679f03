// What:   hamming_topk's scores for blocks of codes as the CPU keeps them (kernels/score/code_score): how many
//         bits of a key's code agree with the codes of the group's queries.
// Math:   out[j] = sum_{h < group} (bits - popcount(query[h] xor code[j])). Of the group's queries
//         c_i have bit i set, so a key gains c_i by a set bit and group - c_i by a clear one: four
//         bits at a time it is a lookup in one table for the whole group, where code_score has one
//         per query.
// Shapes: blocks as code_score's; out [count * 64]. bits a multiple of 8 in 8 .. kMaxCodeBits;
//         group 1 .. kMaxHammingGroup.
// Source: HATA (2025, section 3): score and sum over the group. The table is ours.
// Threads: reentrant.
// Cost:   two lookups per byte of code, whatever the group.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/score/code_score/code_score.h"

namespace carrel::kernels {

// Of a larger group, what one byte of a code gains does not fit a byte.
inline constexpr int64_t kMaxHammingGroup = 31;

struct HammingTables {
  int64_t group = 0;
  int64_t bits = 0;
  std::vector<uint8_t> entries;  // [bits / 4, 16], 0 .. 4 group
};

// y [group, bits] f32: a query's bit is set where y > 0.
void MakeHammingTables(const float* y, int64_t group, int64_t bits, HammingTables& tables);

void BlockHammingScore(const HammingTables& tables, const void* blocks, int64_t count,
                       int16_t* out);
void RefBlockHammingScore(const HammingTables& tables, const void* blocks, int64_t count,
                          int16_t* out);

}  // namespace carrel::kernels
