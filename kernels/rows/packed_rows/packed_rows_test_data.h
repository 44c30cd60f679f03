// What: rows to pack: normally distributed, each channel with a width of its own, and rows of any bits. Tests only.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "common/bf16.h"

namespace carrel::kernels {

// [rows, head_dim]
inline std::vector<uint16_t> NormalRows(std::mt19937_64& rng, int64_t rows, int64_t head_dim) {
  std::normal_distribution<float> normal;
  std::vector<float> width;
  for (int64_t c = 0; c < head_dim; ++c) width.push_back(std::exp(2 * normal(rng)));
  std::vector<uint16_t> x;
  for (int64_t i = 0; i < rows * head_dim; ++i) {
    x.push_back(FloatToBf16(width[static_cast<size_t>(i % head_dim)] * normal(rng)));
  }
  return x;
}

// Infinities, NaNs, denormal numbers and zeros of both signs among them.
inline std::vector<uint16_t> AnyBits(std::mt19937_64& rng, int64_t count) {
  std::vector<uint16_t> x;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = rng();
    const auto any = static_cast<uint16_t>(bits);
    x.push_back(bits >> 60 == 0 ? any & 0x8000 : any);
  }
  return x;
}

}  // namespace carrel::kernels
