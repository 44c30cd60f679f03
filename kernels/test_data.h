// What: inputs and outputs for the tests of kernels: every SIMD target in turn, buffers with poison
//       and guard bands, bf16 rows at odd addresses. Tests only.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/test_util.h"
#include "hwy/targets.h"
#include "kernels/amx.h"

namespace carrel::kernels {

// Stands for AMX beside all targets of this CPU; with any other, AMX is not used.
inline constexpr int64_t kAmx = -1;

// Runs a test once per SIMD target that is compiled in and that this CPU has.
class KernelTest : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam() == kAmx ? 0 : GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SetAmxUsedForTest(GetParam() == kAmx);
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    SetAmxUsedForTest(true);
  }

  int64_t Below(int64_t bound) {  // uniform in [0, bound)
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(rng_);
  }

  std::mt19937_64 rng_{TestSeed()};
};

// Of the targets that a file was compiled for, those that this CPU has. (Highway's own function is
// one for the whole program, whatever each file asks for.)
inline std::vector<int64_t> SupportedTargetsAmong(int64_t compiled) {
  std::vector<int64_t> targets;
  for (int64_t left = hwy::SupportedTargets() & compiled; left != 0; left &= left - 1) {
    targets.push_back(left & -left);
  }
  return targets;
}

inline std::vector<int64_t> WithAmx(std::vector<int64_t> targets) {
  if (AmxAvailable()) targets.push_back(kAmx);
  return targets;
}

inline std::string NameOfTarget(int64_t target) {
  return target == kAmx ? "AMX" : hwy::TargetName(target);
}

// The prefix lets `ctest -R kernels` find the tests.
#define CARREL_KERNEL_TEST_ON(fixture, targets)                          \
  class fixture : public KernelTest {};                                  \
  INSTANTIATE_TEST_SUITE_P(kernels, fixture, testing::ValuesIn(targets), \
                           [](const auto& info) { return NameOfTarget(info.param); })
#define CARREL_KERNEL_TEST(fixture) \
  CARREL_KERNEL_TEST_ON(fixture, SupportedTargetsAmong(HWY_TARGETS))
// For kernels that use AMX where there is some.
#define CARREL_KERNEL_TEST_WITH_AMX(fixture) \
  CARREL_KERNEL_TEST_ON(fixture, WithAmx(SupportedTargetsAmong(HWY_TARGETS)))

// `count` floats, NaN at first, between two bands that nobody may touch.
class GuardedFloats {
 public:
  explicit GuardedFloats(int64_t count) : values_(count + 2 * kBand, Poison()) {}
  ~GuardedFloats() {
    for (int64_t i = 0; i < kBand; ++i) {
      EXPECT_TRUE(IsPoison(values_[i])) << "written " << kBand - i << " before the buffer";
      EXPECT_TRUE(IsPoison(values_[values_.size() - 1 - i]))
          << "written " << kBand - i << " after the buffer";
    }
  }
  GuardedFloats(const GuardedFloats&) = delete;
  GuardedFloats& operator=(const GuardedFloats&) = delete;

  float* data() { return values_.data() + kBand; }
  int64_t size() const { return static_cast<int64_t>(values_.size()) - 2 * kBand; }
  absl::Span<const float> span() { return {data(), static_cast<size_t>(size())}; }
  std::vector<float> vector() { return {data(), data() + size()}; }
  bool Untouched(int64_t i) { return IsPoison(data()[i]); }

 private:
  static constexpr int64_t kBand = 64;
  static float Poison() { return std::bit_cast<float>(0x7fc0dead); }
  static bool IsPoison(float x) { return std::bit_cast<uint32_t>(x) == 0x7fc0dead; }

  std::vector<float> values_;
};

// NaN, the poison between rows, counts as zero.
inline double Norm(absl::Span<const float> x) {
  double sum = 0;
  for (float value : x) sum += std::isnan(value) ? 0.0 : double{value} * double{value};
  return std::sqrt(sum);
}

// Random bf16 rows that begin at an odd address and end with their allocation; row(j) in a shuffled
// order if scattered.
class Bf16Rows {
 public:
  Bf16Rows(std::mt19937_64& rng, int64_t rows, int64_t dim, bool scattered, float sigma = 1.0f)
      : bytes_(1 + rows * dim * 2) {
    const std::vector<float> values = RandomNormal(rng, rows * dim, sigma);
    norm_ = Norm(values);
    for (int64_t i = 0; i < rows * dim; ++i) {
      const uint16_t bits = FloatToBf16(values[i]);
      std::memcpy(bytes_.data() + 1 + 2 * i, &bits, sizeof(bits));
    }
    for (int64_t j = 0; j < rows; ++j) pointers_.push_back(bytes_.data() + 1 + 2 * j * dim);
    if (scattered) std::shuffle(pointers_.begin(), pointers_.end(), rng);
  }

  const void* data() const { return bytes_.data() + 1; }
  const void* const* rows() const { return pointers_.data(); }
  double norm() const { return norm_; }

 private:
  std::vector<uint8_t> bytes_;
  std::vector<const void*> pointers_;
  double norm_ = 0;
};

// ||out - ref|| <= tolerance * scale: for inner products, which may cancel, the scale is the
// product of the operands' norms. NaN must stand in the same places.
inline void ExpectNear(absl::Span<const float> out, absl::Span<const float> ref, double scale,
                       double tolerance = 2e-7) {
  ASSERT_EQ(out.size(), ref.size());
  std::vector<float> difference;
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_EQ(std::isnan(out[i]), std::isnan(ref[i])) << "at " << i;
    if (!std::isnan(ref[i]) && out[i] != ref[i]) difference.push_back(out[i] - ref[i]);
  }
  EXPECT_LE(Norm(difference), tolerance * scale);
}

// Averages of standard normal rows: the relative error, lest a few values average to near zero.
inline void ExpectAverageNear(absl::Span<const float> out, absl::Span<const float> ref,
                              double tolerance = 3e-6) {
  ExpectNear(out, ref, Norm(ref) + 0.03 * std::sqrt(static_cast<double>(ref.size())), tolerance);
}

// Logarithms: an absolute error near 0, a relative one elsewhere.
inline void ExpectLseNear(absl::Span<const float> out, absl::Span<const float> ref,
                          double tolerance = 3e-6) {
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] == ref[i]) continue;
    EXPECT_NEAR(out[i], ref[i], tolerance * std::max(1.0f, std::abs(ref[i]))) << "head " << i;
  }
}

inline bool SameBits(absl::Span<const float> a, absl::Span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace carrel::kernels
