// What: a printed seed, random values and the one comparer, for tests and benchmarks that must
//       build with the standard library alone (those that run on a GPU machine).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <vector>

namespace carrel {

// A fresh seed each run, printed; CARREL_SEED repeats one.
inline uint64_t TestSeed() {
  const char* fixed = std::getenv("CARREL_SEED");
  const uint64_t seed =
      fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
  std::cout << "seed: CARREL_SEED=" << seed << std::endl;
  return seed;
}

inline std::vector<float> RandomNormal(std::mt19937_64& rng, int64_t count, float sigma = 1.0f) {
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(rng);
  return values;
}

// ||out - ref|| / ||ref||; infinite if the places of non-finite values differ; ||out|| if ref is
// zero.
inline double RelativeError(const float* out, const float* ref, int64_t count) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(out[i]) || !std::isfinite(ref[i])) {
      if (out[i] == ref[i] || (std::isnan(out[i]) && std::isnan(ref[i]))) continue;
      return INFINITY;
    }
    const double d = double{out[i]} - double{ref[i]};
    error += d * d;
    norm += double{ref[i]} * double{ref[i]};
  }
  if (norm == 0) return std::sqrt(error);
  return std::sqrt(error / norm);
}

}  // namespace carrel
