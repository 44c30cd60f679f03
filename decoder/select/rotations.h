// What:   random directions for binary codes, the same on every device, and keys made of codes again.
// Math:   rows of an orthonormal basis of head_dim, as many bases as it takes; rounded to bf16, as
//         a GPU's tensor cores want them. A key, less the mean of all, is about the sum of +-
//         decoder[i], where decoder[i] = spread[i] min(1, d / bits) directions[i], spread[i] the mean
//         of |<directions[i], key> - threshold[i]| over sampled keys.
// Shapes: directions, decoder [bits, d] f32; threshold [bits]: what the mean itself scores; keys
//         [samples, d].
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace carrel::decoder {

std::vector<float> RandomRotations(int64_t bits, int64_t d, uint64_t seed);

// The keys that tell of the spread: every stride-th of a zone.
struct SpreadSample {
  explicit SpreadSample(int64_t rows)
      : stride(std::max<int64_t>(1, rows / 256)), count(std::min<int64_t>(256, rows)) {}
  int64_t stride, count;
};
std::vector<float> RotationDecoder(const std::vector<float>& directions,
                                   const std::vector<float>& threshold,
                                   const std::vector<float>& keys, int64_t d);

}  // namespace carrel::decoder
