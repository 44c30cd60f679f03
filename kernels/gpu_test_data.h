// What: inputs and outputs for the tests of GPU kernels: device arrays of exact size, poison, guard
//       bands, bf16 rows, the comparers. Needs the standard library, GoogleTest and the CUDA
//       runtime alone. Tests only.
// Ownership: each array owns its memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/bf16.h"
#include "common/cuda/runtime.h"
#include "common/test_random.h"

namespace carrel::kernels {

#define CARREL_ASSERT_CUDA(call) ASSERT_EQ(cudaSuccess, (call))
#define CARREL_EXPECT_CUDA(call) EXPECT_EQ(cudaSuccess, (call))

class GpuKernelTest : public testing::Test {
 protected:
  int64_t Below(int64_t bound) {  // uniform in [0, bound)
    return std::uniform_int_distribution<int64_t>(0, bound - 1)(rng_);
  }
  void TearDown() override {
    CARREL_EXPECT_CUDA(cudaDeviceSynchronize());
    CARREL_EXPECT_CUDA(cudaGetLastError());
  }

  std::mt19937_64 rng_{TestSeed()};
};

inline void* DeviceAllocate(size_t bytes) {
  void* data = nullptr;
  CARREL_EXPECT_CUDA(cudaMalloc(&data, bytes));
  return data;
}

// A copy of host values that ends with its allocation, so that a checker sees a read beyond it.
template <class T>
class DeviceInput {
 public:
  explicit DeviceInput(const std::vector<T>& values) {
    if (values.empty()) return;
    data_ = static_cast<T*>(DeviceAllocate(values.size() * sizeof(T)));
    CARREL_EXPECT_CUDA(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceInput() { CARREL_EXPECT_CUDA(cudaFree(data_)); }
  DeviceInput(const DeviceInput&) = delete;
  DeviceInput& operator=(const DeviceInput&) = delete;

  T* data() const { return data_; }
  void Set(const std::vector<T>& values) {
    CARREL_EXPECT_CUDA(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }

 private:
  T* data_ = nullptr;
};

// Bytes of 255 at first (floats and bf16: NaN; integers: -1), between two bands that nobody may
// touch.
template <class T>
class DeviceOutput {
 public:
  explicit DeviceOutput(int64_t count) : count_(count) {
    bytes_ = static_cast<uint8_t*>(DeviceAllocate(Bytes()));
    Poison();
  }
  ~DeviceOutput() {
    std::vector<uint8_t> all(Bytes());
    CARREL_EXPECT_CUDA(cudaMemcpy(all.data(), bytes_, all.size(), cudaMemcpyDeviceToHost));
    CARREL_EXPECT_CUDA(cudaFree(bytes_));
    const auto whole = [&](size_t begin) {
      return std::all_of(all.begin() + static_cast<int64_t>(begin),
                         all.begin() + static_cast<int64_t>(begin + kBand),
                         [](uint8_t x) { return x == 255; });
    };
    EXPECT_TRUE(whole(0)) << "written before the buffer";
    EXPECT_TRUE(whole(all.size() - kBand)) << "written after the buffer";
  }
  DeviceOutput(const DeviceOutput&) = delete;
  DeviceOutput& operator=(const DeviceOutput&) = delete;

  void Poison() { CARREL_EXPECT_CUDA(cudaMemset(bytes_, 255, Bytes())); }
  T* data() const { return reinterpret_cast<T*>(bytes_ + kBand); }
  std::vector<T> Get() const {  // waits for the device
    std::vector<T> values(static_cast<size_t>(count_));
    CARREL_EXPECT_CUDA(
        cudaMemcpy(values.data(), data(), values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  static constexpr size_t kBand = 1024;
  size_t Bytes() const { return 2 * kBand + static_cast<size_t>(count_) * sizeof(T); }

  int64_t count_;
  uint8_t* bytes_ = nullptr;
};

// Zeroed, as kernels want theirs.
class DeviceWorkspace {
 public:
  explicit DeviceWorkspace(size_t bytes) {
    if (bytes == 0) return;
    data_ = DeviceAllocate(bytes);
    CARREL_EXPECT_CUDA(cudaMemset(data_, 0, bytes));
  }
  ~DeviceWorkspace() { CARREL_EXPECT_CUDA(cudaFree(data_)); }
  DeviceWorkspace(const DeviceWorkspace&) = delete;
  DeviceWorkspace& operator=(const DeviceWorkspace&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Nearly normal, and fast enough for hundreds of millions.
inline std::vector<uint16_t> RandomBf16(std::mt19937_64& rng, int64_t count, float sigma = 1.0f) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  uint64_t state = rng() | 1;
  for (uint16_t& value : values) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    int sum = 0;  // of four, each uniform in 0 .. 65535
    for (int i = 0; i < 4; ++i) sum += static_cast<int>(state >> (16 * i) & 0xffff);
    value = FloatToBf16(sigma * static_cast<float>(sum - 2 * 65535) / 37837.0f);
  }
  return values;
}

// Multiples of 1/8 up to 4: sums of 128 products of two are exact in fp32, so that scores are the
// same in whatever order they are summed, and ties are ties.
inline std::vector<uint16_t> RandomGridBf16(std::mt19937_64& rng, int64_t count) {
  std::vector<uint16_t> values = RandomBf16(rng, count);
  for (uint16_t& value : values) {
    value = FloatToBf16(std::clamp(std::round(8 * Bf16ToFloat(value)), -32.0f, 32.0f) / 8);
  }
  return values;
}

inline std::vector<uint32_t> RandomWords(std::mt19937_64& rng, int64_t count) {
  std::vector<uint32_t> words(static_cast<size_t>(count));
  for (uint32_t& word : words) word = static_cast<uint32_t>(rng());
  return words;
}

inline std::vector<float> Widen(const uint16_t* values, int64_t count) {
  std::vector<float> wide(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) wide[static_cast<size_t>(i)] = Bf16ToFloat(values[i]);
  return wide;
}

inline std::vector<float> Widen(const std::vector<uint16_t>& values) {
  return Widen(values.data(), static_cast<int64_t>(values.size()));
}

inline std::vector<uint16_t> Round(const std::vector<float>& values) {
  std::vector<uint16_t> rounded;
  rounded.reserve(values.size());
  for (float value : values) rounded.push_back(FloatToBf16(value));
  return rounded;
}

inline double Norm(const std::vector<float>& x) {
  double sum = 0;
  for (float value : x) sum += double{value} * double{value};
  return std::sqrt(sum);
}

inline double RelativeError(const std::vector<float>& out, const std::vector<float>& ref) {
  if (out.size() != ref.size()) return INFINITY;
  return carrel::RelativeError(out.data(), ref.data(), static_cast<int64_t>(out.size()));
}

// Of results rounded to bf16, which err by 1.1e-3 of their norm.
inline constexpr double kBf16Tolerance = 3e-3;

// Weights are rounded to bf16: 2^-9 at most, a third of that on average.
inline constexpr double kAttentionTolerance = 3e-3;

// Averages of rows: the relative error, lest a few values average to near zero.
inline void ExpectAttentionNear(const std::vector<float>& out, const std::vector<float>& ref,
                                double tolerance = kAttentionTolerance) {
  ASSERT_EQ(out.size(), ref.size());
  double error = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_TRUE(std::isfinite(out[i])) << "at " << i;
    error += (double{out[i]} - ref[i]) * (double{out[i]} - ref[i]);
  }
  const double scale = Norm(ref) + 0.03 * std::sqrt(static_cast<double>(ref.size()));
  EXPECT_LE(std::sqrt(error), tolerance * scale);
}

inline void ExpectLseNear(const std::vector<float>& out, const std::vector<float>& ref,
                          double tolerance = 1e-5) {
  ASSERT_EQ(out.size(), ref.size());
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i] == ref[i]) continue;
    EXPECT_NEAR(out[i], ref[i], tolerance * std::max(1.0f, std::abs(ref[i]))) << "head " << i;
  }
}

template <class T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace carrel::kernels
