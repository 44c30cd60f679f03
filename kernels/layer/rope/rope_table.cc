#include "kernels/layer/rope/rope_table.h"

#include <cmath>

namespace carrel::kernels {

RopeTable::RopeTable(const std::vector<float>& inv_freq, int64_t positions)
    : half_(static_cast<int64_t>(inv_freq.size())),
      positions_(positions),
      angles_(static_cast<size_t>(positions * 2 * half_)) {
  for (int64_t p = 0; p < positions; ++p) {
    float* cosines = &angles_[static_cast<size_t>(p * 2 * half_)];
    for (int64_t c = 0; c < half_; ++c) {
      const float angle = static_cast<float>(p) * inv_freq[static_cast<size_t>(c)];
      cosines[c] = std::cos(angle);
      cosines[half_ + c] = std::sin(angle);
    }
  }
}

void RopeTable::Turn(const float* x, int64_t position, float* out) const {
  const float* cosines = At(position);
  const float* sines = cosines + half_;
  for (int64_t c = 0; c < half_; ++c) {
    const float low = x[c], high = x[c + half_];
    out[c] = low * cosines[c] - high * sines[c];
    out[c + half_] = high * cosines[c] + low * sines[c];
  }
}

void RopeTable::TurnBack(const float* x, int64_t position, float* out) const {
  const float* cosines = At(position);
  const float* sines = cosines + half_;
  for (int64_t c = 0; c < half_; ++c) {
    const float low = x[c], high = x[c + half_];
    out[c] = low * cosines[c] + high * sines[c];
    out[c + half_] = high * cosines[c] - low * sines[c];
  }
}

}  // namespace carrel::kernels
