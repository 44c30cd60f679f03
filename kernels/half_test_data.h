// What: f16 beside the bf16 of gpu_test_data.h. Tests only.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "common/dtype.h"

namespace carrel::kernels {

// One rounding to f16, 2^-12 on average and more near zero.
inline constexpr double kF16Tolerance = 5e-4;

inline std::vector<float> WidenF16(const std::vector<uint16_t>& values) {
  std::vector<float> wide;
  for (const uint16_t value : values) wide.push_back(F16ToFloat(value));
  return wide;
}

// Of magnitudes 2^-6 to 4.
inline std::vector<uint16_t> RandomF16(std::mt19937_64& rng, int64_t count) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) {
    const uint64_t bits = rng();
    value = static_cast<uint16_t>((bits >> 20 & 1) << 15 | (9 + (bits >> 10 & 7)) << 10 |
                                  (bits & 1023));
  }
  return values;
}

}  // namespace carrel::kernels
