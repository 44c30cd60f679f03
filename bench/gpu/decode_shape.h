// What: the shape that decoding is measured at: that of an 8B model, one token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "bench/gpu/harness.h"
#include "common/bf16.h"

namespace carrel::gpu_bench {

inline constexpr int64_t kKvHeads = 8, kGroup = 4, kQHeads = kKvHeads * kGroup, kHeadDim = 128;
inline constexpr int64_t kBits = 128, kTopK = 2048;
inline constexpr float kScale = 0.088388348f;  // 1 / sqrt(128)

inline std::vector<int64_t> DecodeLengths(bool quick) {
  if (quick) return {32 << 10};
  return {32 << 10, 128 << 10, 256 << 10, 1 << 20};
}

inline std::string DecodeShapeName(int64_t n) {
  return "32 q heads, 8 KV heads, head_dim 128, N " + std::to_string(n);
}

// Sets of buffers of so many bytes each that, used in turn, exceed L2 several times.
inline int64_t Copies(double bytes, int64_t most) {
  return std::clamp(static_cast<int64_t>(std::ceil(400e6 / bytes)), int64_t{2}, most);
}

inline std::vector<float> Widen(const std::vector<uint16_t>& values) {
  std::vector<float> wide;
  wide.reserve(values.size());
  for (uint16_t value : values) wide.push_back(Bf16ToFloat(value));
  return wide;
}

}  // namespace carrel::gpu_bench
