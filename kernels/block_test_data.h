// What: inputs that the tests of block_prune and block_sparse_attention on the GPU share. Tests only.
// Ownership: each value owns its memory.
#pragma once

#include <cmath>
#include <vector>

#include "kernels/block_layout.h"
#include "kernels/gpu_test_data.h"

namespace carrel::kernels {

// As RopeTable makes it, with a base of 10,000.
inline std::vector<float> TurnAngles(int64_t positions, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  std::vector<float> angles(static_cast<size_t>(positions * 2 * half));
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t c = 0; c < half; ++c) {
      const float inv_freq = std::pow(10000.0f, -static_cast<float>(c) / static_cast<float>(half));
      const float angle = static_cast<float>(p) * inv_freq;
      angles[static_cast<size_t>(p * 2 * half + c)] = std::cos(angle);
      angles[static_cast<size_t>((p * 2 + 1) * half + c)] = std::sin(angle);
    }
  }
  return angles;
}

inline std::vector<int32_t> Flat(const std::vector<ChosenRowsHead>& heads) {
  std::vector<int32_t> flat;
  for (const ChosenRowsHead& head : heads) {
    flat.insert(flat.end(), {head.count, head.length, head.rows});
  }
  return flat;
}

}  // namespace carrel::kernels
