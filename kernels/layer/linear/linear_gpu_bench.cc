// What:  y = x W^T for one token at the shapes of an 8B model: our kernel against cuBLASLt, weights
//        cold.
// Usage: linear_gpu_bench     one JSON object a line
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "common/bf16.h"
#include "common/cuda/buffer.h"
#include "common/test_random.h"
#include "kernels/layer/linear/linear_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kRepetitions = 60;
constexpr int64_t kColdBytes = int64_t{512} << 20;  // of weights in turn: far more than L2

int Measure(LinearCuda& linear, int64_t in, int64_t out, const std::vector<uint16_t>& random) {
  const int64_t elements = in * out;
  const int64_t copies = std::max<int64_t>(2, kColdBytes / (elements * 2));
  auto w = cuda::DeviceBuffer<uint16_t>::Create(elements * copies);
  auto x = cuda::DeviceBuffer<uint16_t>::Create(in);
  auto y = cuda::DeviceBuffer<float>::Create(out);
  if (!w.ok() || !x.ok() || !y.ok()) return 1;
  const auto block = static_cast<int64_t>(random.size());
  for (int64_t at = 0; at < w->size(); at += block) {
    cudaMemcpy(w->data() + at, random.data(),
               static_cast<size_t>(std::min(block, w->size() - at)) * 2, cudaMemcpyDefault);
  }
  cudaMemcpy(x->data(), random.data(), static_cast<size_t>(in) * 2, cudaMemcpyDefault);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> results[2];
  double median[2] = {};
  for (const bool own : {true, false}) {
    std::vector<float> times;
    for (int i = 0; i < kRepetitions; ++i) {
      LinearCudaParams p;
      p.x = x->data();
      p.w = w->data() + i % copies * elements;
      p.n = 1;
      p.in = in;
      p.out = out;
      p.y = y->data();
      cudaEventRecord(begin);
      if ((own ? GemvCuda(p, nullptr) : linear.Gemm(p, nullptr)) != cudaSuccess) return 1;
      cudaEventRecord(end);
      if (cudaEventSynchronize(end) != cudaSuccess) return 1;
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      if (i >= 10) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    median[own] = times[times.size() / 2];
    results[own].resize(static_cast<size_t>(out));
    cudaMemcpy(results[own].data(), y->data(), static_cast<size_t>(out) * 4, cudaMemcpyDefault);
  }
  const double bytes = 2.0 * static_cast<double>(elements);
  std::printf(
      "{\"kernel\": \"linear\", \"n\": 1, \"in\": %lld, \"out\": %lld, \"own_us\": %.1f, "
      "\"own_tb_per_s\": %.2f, "
      "\"cublaslt_us\": %.1f, \"cublaslt_tb_per_s\": %.2f, \"relative_difference\": %.1e}\n",
      static_cast<long long>(in), static_cast<long long>(out), median[1] * 1e3,
      bytes / median[1] / 1e9, median[0] * 1e3, bytes / median[0] / 1e9,
      RelativeError(results[1].data(), results[0].data(), out));
  return 0;
}

}  // namespace
}  // namespace carrel::kernels

int main() {
  using namespace carrel;
  std::mt19937_64 rng(TestSeed());
  std::vector<uint16_t> random;
  for (float v : RandomNormal(rng, (1 << 20) + 977)) random.push_back(FloatToBf16(v));
  auto workspace = cuda::DeviceBuffer<uint8_t>::Create(kernels::LinearCuda::kWorkspaceBytes);
  if (!workspace.ok()) return 1;
  auto linear = kernels::LinearCuda::Create(workspace->data());
  if (!linear.ok()) return 1;
  int failed = 0;
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{4096, 6144},
                                {4096, 4096},
                                {4096, 28672},
                                {14336, 4096},
                                {4096, 128256}}) {
    failed += kernels::Measure(**linear, in, out, random);
  }
  return failed;
}
