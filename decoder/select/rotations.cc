#include "decoder/select/rotations.h"

#include <cmath>
#include <random>

#include "common/bf16.h"

namespace carrel::decoder {

std::vector<float> RandomRotations(int64_t bits, int64_t d, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<double> normal;
  std::vector<float> directions(static_cast<size_t>(bits * d));
  std::vector<double> basis;
  for (int64_t b = 0; b < bits; ++b) {
    if (b % d == 0) basis.clear();
    std::vector<double> x(static_cast<size_t>(d));
    for (double& value : x) value = normal(rng);
    for (size_t at = 0; at < basis.size(); at += x.size()) {  // Gram-Schmidt
      double dot = 0;
      for (size_t c = 0; c < x.size(); ++c) dot += x[c] * basis[at + c];
      for (size_t c = 0; c < x.size(); ++c) x[c] -= dot * basis[at + c];
    }
    double norm = 0;
    for (const double value : x) norm += value * value;
    norm = std::sqrt(norm);
    for (size_t c = 0; c < x.size(); ++c) {
      x[c] /= norm;
      directions[static_cast<size_t>(b) * x.size() + c] =
          Bf16ToFloat(FloatToBf16(static_cast<float>(x[c])));
    }
    basis.insert(basis.end(), x.begin(), x.end());
  }
  return directions;
}

std::vector<float> RotationDecoder(const std::vector<float>& directions,
                                   const std::vector<float>& threshold,
                                   const std::vector<float>& keys, int64_t d) {
  const auto width = static_cast<size_t>(d);
  const size_t bits = threshold.size(), samples = keys.size() / width;
  const double share = std::min(1.0, static_cast<double>(d) / static_cast<double>(bits));
  std::vector<float> decoder;
  decoder.reserve(directions.size());
  for (size_t b = 0; b < bits; ++b) {
    double sum = 0;
    for (size_t i = 0; i < samples; ++i) {
      float dot = 0;
      for (size_t c = 0; c < width; ++c) dot += directions[b * width + c] * keys[i * width + c];
      sum += std::abs(dot - threshold[b]);
    }
    const double spread = sum / static_cast<double>(std::max<size_t>(1, samples));
    for (size_t c = 0; c < width; ++c) {
      const double x = spread * share * directions[b * width + c];
      decoder.push_back(Bf16ToFloat(FloatToBf16(static_cast<float>(x))));
    }
  }
  return decoder;
}

}  // namespace carrel::decoder
