// What:   rotary position embedding of single vectors at any of a range of positions, forwards and
//         backwards, from a table of cosines and sines.
// Math:   Turn: x at position p as kernels/layer/rope does it. TurnBack: its inverse, as if at -p: with
//         q left alone, <q, TurnBack(k, d)> is the score of a key that stands d tokens before q.
// Shapes: x, out [head_dim] f32; out may be x.
// Units:  angles are float(position) * inv_freq in float, as kernels/layer/rope takes them.
// Edge:   a position of the table or beyond counts as the last one.
// Threads: reentrant.
// Cost:   4 bytes * head_dim per position of memory, and a cosine and a sine for each of those at
//         construction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace carrel::kernels {

class RopeTable {
 public:
  // positions >= 1.
  RopeTable(const std::vector<float>& inv_freq, int64_t positions);

  int64_t positions() const { return positions_; }
  // [positions, 2, head_dim / 2]: cosines, then sines.
  const std::vector<float>& angles() const { return angles_; }
  void Turn(const float* x, int64_t position, float* out) const;
  void TurnBack(const float* x, int64_t position, float* out) const;

 private:
  const float* At(int64_t position) const {
    return &angles_[static_cast<size_t>(std::min(position, positions_ - 1) * 2 * half_)];
  }

  const int64_t half_, positions_;
  std::vector<float> angles_;
};

}  // namespace carrel::kernels
