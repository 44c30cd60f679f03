// What: what every test shares: a printed seed, the one comparer, matchers of Status. Tests only.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

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

// ||out - ref|| / ||ref||; infinite if the sizes or the places of non-finite values differ; ||out||
// if ref is zero.
inline double RelativeError(absl::Span<const float> out, absl::Span<const float> ref) {
  if (out.size() != ref.size()) return INFINITY;
  double error = 0, norm = 0;
  for (size_t i = 0; i < out.size(); ++i) {
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

inline const absl::Status& ToStatus(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& ToStatus(const T& status_or) {
  return status_or.status();
}

#define CARREL_ASSERT_OK(expr) ASSERT_EQ(absl::OkStatus(), ::carrel::ToStatus(expr))
#define CARREL_EXPECT_OK(expr) EXPECT_EQ(absl::OkStatus(), ::carrel::ToStatus(expr))

// StatusIs(code, substring of the message)
MATCHER_P2(StatusIs, code, substring,
           absl::StrCat("has code ", absl::StatusCodeToString(code), " and a message with \"",
                        substring, "\"")) {
  const absl::Status& status = ToStatus(arg);
  *result_listener << status;
  return status.code() == code &&
         std::string(status.message()).find(substring) != std::string::npos;
}

// A folder of this test's own, emptied first; parallel tests do not share it.
std::string FreshTempDir();

}  // namespace carrel
