#include "decoder/refine/rotations.h"

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

}  // namespace carrel::decoder
