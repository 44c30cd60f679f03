// What:   RoPE of made rows: channels (c, c + d / 2) turn by position * theta^(-2 c / d).
// Edge:   theta 0: nothing turns.      Threads: reentrant.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "common/ids.h"

namespace carrel::synth {

class Rotary {
 public:
  Rotary(int64_t d, double theta) : half_(d / 2) {
    for (int64_t c = 0; c < half_; ++c) {
      const double share = static_cast<double>(c) / static_cast<double>(half_);
      angle_.push_back(theta > 0 ? std::pow(theta, -share) : 0);
      step_cos_.push_back(static_cast<float>(std::cos(angle_.back())));
      step_sin_.push_back(static_cast<float>(std::sin(angle_.back())));
    }
  }

  // cos, sin [d / 2] of a position.
  void At(Position position, float* cos, float* sin) const {
    for (int64_t c = 0; c < half_; ++c) {
      const double turn = static_cast<double>(position) * angle_[c];
      cos[c] = static_cast<float>(std::cos(turn));
      sin[c] = static_cast<float>(std::sin(turn));
    }
  }
  // From one position to the next; call At now and then, lest rounding adds up.
  void Advance(float* cos, float* sin) const {
    for (int64_t c = 0; c < half_; ++c) {
      const float next = cos[c] * step_cos_[c] - sin[c] * step_sin_[c];
      sin[c] = sin[c] * step_cos_[c] + cos[c] * step_sin_[c];
      cos[c] = next;
    }
  }
  // x [d] in place; back turns the other way.
  void Turn(Position position, float* x, bool back = false) const {
    for (int64_t c = 0; c < half_; ++c) {
      const double turn = static_cast<double>(back ? -position : position) * angle_[c];
      const auto cos = static_cast<float>(std::cos(turn));
      const auto sin = static_cast<float>(std::sin(turn));
      const float a = x[c], b = x[c + half_];
      x[c] = a * cos - b * sin;
      x[c + half_] = b * cos + a * sin;
    }
  }

 private:
  const int64_t half_;
  std::vector<double> angle_;
  std::vector<float> step_cos_, step_sin_;
};

}  // namespace carrel::synth
