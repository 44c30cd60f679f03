// What:   256 numbers of an input in 16 bits, and what is known of them (packed_input-inl.h).
#pragma once

#include <cstdint>

namespace carrel::kernels {

inline constexpr int64_t kChunkValues = 256;
inline constexpr int64_t kChunkGroups = 8;

struct PackedChunk {
  int16_t words[kChunkValues] = {};
  float scales[kChunkGroups] = {};  // of 32 numbers each
  float sums[kChunkGroups] = {};    // of 32 numbers each, as rounded
  // 32 times the sum of the words of each 16 numbers (WordOrder::kPairs).
  int32_t half_sums[2 * kChunkGroups] = {};
};

inline int64_t PackedChunks(int64_t in) { return (in + kChunkValues - 1) / kChunkValues; }

}  // namespace carrel::kernels
