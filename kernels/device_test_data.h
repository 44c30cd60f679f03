// What: arrays of tests on the device: inputs copied there, outputs poisoned before and checked for
//       writes outside. Tests only.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "common/bf16.h"
#include "common/cuda/buffer.h"
#include "common/cuda/runtime.h"
#include "common/test_random.h"

namespace carrel::kernels {

inline std::vector<uint16_t> ToBf16(const std::vector<float>& values) {
  std::vector<uint16_t> out;
  out.reserve(values.size());
  for (float x : values) out.push_back(FloatToBf16(x));
  return out;
}

inline std::vector<float> FromBf16(const std::vector<uint16_t>& values) {
  std::vector<float> out;
  out.reserve(values.size());
  for (uint16_t x : values) out.push_back(Bf16ToFloat(x));
  return out;
}

inline std::vector<uint16_t> RandomBf16(std::mt19937_64& rng, int64_t count, float sigma = 1.0f) {
  return ToBf16(RandomNormal(rng, count, sigma));
}

// `count` elements between two bands that nobody may write; all bytes 0xff (NaN) at first, or
// copied from a vector. Aligned to 256 bytes.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : DeviceArray(std::vector<T>(), count) {}
  explicit DeviceArray(const std::vector<T>& values)
      : DeviceArray(values, static_cast<int64_t>(values.size())) {}
  ~DeviceArray() {
    std::vector<uint8_t> bytes(static_cast<size_t>(buffer_.bytes()));
    EXPECT_EQ(cudaSuccess,
              cudaMemcpy(bytes.data(), buffer_.data(), bytes.size(), cudaMemcpyDefault));
    for (int64_t i = 0; i < kBandBytes; ++i) {
      if (bytes[i] == 0xff && bytes[bytes.size() - 1 - i] == 0xff) continue;
      ADD_FAILURE() << "written outside of the buffer";
      return;
    }
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return reinterpret_cast<T*>(buffer_.data() + kBandBytes); }
  // Waits for the device.
  std::vector<T> Read() const {
    std::vector<T> values(static_cast<size_t>(count_));
    EXPECT_EQ(cudaSuccess,
              cudaMemcpy(values.data(), data(), values.size() * sizeof(T), cudaMemcpyDefault));
    return values;
  }

 private:
  static constexpr int64_t kBandBytes = 256;
  DeviceArray(const std::vector<T>& values, int64_t count) : count_(count) {
    auto buffer = cuda::DeviceBuffer<uint8_t>::Create(count * static_cast<int64_t>(sizeof(T)) +
                                                      2 * kBandBytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    buffer_ = *std::move(buffer);
    EXPECT_EQ(cudaSuccess, cudaMemset(buffer_.data(), 0xff, static_cast<size_t>(buffer_.bytes())));
    EXPECT_EQ(cudaSuccess,
              cudaMemcpy(data(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
  }

  int64_t count_;
  cuda::DeviceBuffer<uint8_t> buffer_;
};

inline double ErrorOf(const std::vector<float>& out, const std::vector<float>& ref) {
  if (out.size() != ref.size()) return INFINITY;
  return RelativeError(out.data(), ref.data(), static_cast<int64_t>(out.size()));
}

class DeviceTest : public testing::Test {
 protected:
  int64_t Below(int64_t bound) {
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(rng_);
  }
  std::mt19937_64 rng_{TestSeed()};
};

inline constexpr double kBf16Tolerance =
    3e-3;  // outputs rounded to bf16 err by 1.1e-3 of their norm

}  // namespace carrel::kernels
