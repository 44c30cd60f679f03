// What:   what every benchmark of a GPU kernel needs: random device memory, timing with cold
//         caches, the rates that the device reaches, results as one JSON object a line on standard
//         output.
// Method: launches over buffers in turn, so many that they exceed L2 several times, are captured in
//         one graph; its replays are timed by events. A time is that of a replay over its launches,
//         gaps between launches included: what a decode step pays.
// Errors: a failed call, or a result further from its reference than allowed, ends the program.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "common/cuda/runtime.h"

namespace carrel::gpu_bench {

void Check(cudaError_t error, const char* call);
#define CARREL_CHECK_CUDA(call) ::carrel::gpu_bench::Check((call), #call)

// Device memory for the program's lifetime.
template <class T>
T* Allocate(int64_t count) {
  void* data = nullptr;
  CARREL_CHECK_CUDA(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)));
  CARREL_CHECK_CUDA(cudaMemset(data, 0, static_cast<size_t>(count) * sizeof(T)));
  return static_cast<T*>(data);
}

template <class T>
std::vector<T> Download(const T* data, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  CARREL_CHECK_CUDA(cudaMemcpy(values.data(), data, values.size() * sizeof(T), cudaMemcpyDefault));
  return values;
}

// fill.cu
cudaError_t FillNormalBf16(uint16_t* data, int64_t count, float sigma, uint64_t seed);
cudaError_t FillBits(uint32_t* data, int64_t count, uint64_t seed);
cudaError_t FillNormal(float* data, int64_t count, uint64_t seed);
// bytes: a multiple of 16.
cudaError_t CopyAll(const void* from, void* to, int64_t bytes, cudaStream_t stream);
// Reads all bytes, a multiple of 16, and writes a sum.
cudaError_t ReadAll(const void* data, int64_t bytes, uint32_t* sum, cudaStream_t stream);

struct Timing {
  double us = 0, us_p10 = 0, us_p90 = 0;  // of one launch
};

struct Result {
  std::string kernel;
  std::string shape;
  int64_t n = 0;  // rows per KV head, or what the table is ordered by
  Timing time;
  double bytes = 0;  // that a launch must move at least
  double flops = 0;  // 0 if memory is the limit
  double error = 0;  // against the reference, as `error_of` says
  std::string error_of;
};

class Bench {
 public:
  Bench(uint64_t seed, bool quick);

  // launch(i, stream) enqueues the i-th of `count` launches, each on buffers of its own.
  Timing Time(int64_t count, const std::function<cudaError_t(int64_t, cudaStream_t)>& launch);
  // Measured at first use, then the same: bytes read and written by a copy (kernel), bytes read by
  // a sum, and operations of a large bf16 matrix product (0 without cuBLASLt).
  double CopyBytesPerS();
  double ReadBytesPerS();
  double GemmFlops();

  void Report(const Result& result);
  // Ends the program unless error <= bound.
  void Expect(const std::string& what, double error, double bound);

  bool quick() const { return quick_; }
  std::mt19937_64& rng() { return rng_; }

 private:
  std::mt19937_64 rng_;
  bool quick_;
  cudaStream_t stream_ = nullptr;
  double copy_ = 0, read_ = 0, gemm_ = 0;
};

// gemm.cc; 0 if it cannot be measured.
double MeasureGemmFlops(Bench& bench);

// One function per file of kernels; main.cc calls them in turn.
void DecodeBenches(Bench& bench);
void SelectBenches(Bench& bench);
void RefineBenches(Bench& bench);
void TermBenches(Bench& bench);

}  // namespace carrel::gpu_bench
