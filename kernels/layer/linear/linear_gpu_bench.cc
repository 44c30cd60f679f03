// What:  y = x W^T for few tokens at the shapes of an 8B model: our kernel against cuBLASLt, weights
//        cold.
// Usage: linear_gpu_bench     one JSON object a line
#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "common/bf16.h"
#include "common/cuda/buffer.h"
#include "common/test_random.h"
#include "kernels/layer/linear/linear_cuda.h"

namespace carrel::kernels {
namespace {

constexpr int kRepetitions = 60;
constexpr int kWarmUp = 10;
constexpr int64_t kColdBytes = int64_t{512} << 20;  // of weights in turn: far more than L2

class Products {
 public:
  explicit Products(LinearCuda& linear) : linear_(linear) {
    cudaEventCreate(&begin_);
    cudaEventCreate(&end_);
  }

  int Measure(int64_t in, int64_t out, const std::vector<uint16_t>& random) {
    const int64_t elements = in * out;
    const int64_t copies = std::max<int64_t>(2, kColdBytes / (elements * 2));
    auto w = cuda::DeviceBuffer<uint16_t>::Create(elements * copies);
    auto x = cuda::DeviceBuffer<uint16_t>::Create(kFewRows * in);
    auto y = cuda::DeviceBuffer<float>::Create(kFewRows * out);
    if (!w.ok() || !x.ok() || !y.ok()) return 1;
    const auto block = static_cast<int64_t>(random.size());
    for (int64_t at = 0; at < w->size(); at += block) {
      cudaMemcpy(w->data() + at, random.data(),
                 static_cast<size_t>(std::min(block, w->size() - at)) * 2, cudaMemcpyDefault);
    }
    cudaMemcpy(x->data(), random.data(), static_cast<size_t>(kFewRows * in) * 2, cudaMemcpyDefault);
    int failed = 0;
    for (const int64_t n : {1, 8, 16, 32}) {
      LinearCudaParams p;
      p.x = x->data();
      p.w = w->data();
      p.n = n;
      p.in = in;
      p.out = out;
      p.y = y->data();
      failed += Compare(p, elements, copies);
    }
    return failed;
  }

 private:
  using Product = std::function<cudaError_t(const LinearCudaParams&)>;

  // Median, in us; below 0: it failed.
  double Time(LinearCudaParams p, int64_t elements, int64_t copies, const Product& product) {
    std::vector<float> times;
    const auto* const w = static_cast<const uint16_t*>(p.w);
    for (int i = 0; i < kRepetitions; ++i) {
      p.w = w + i % copies * elements;
      cudaEventRecord(begin_);
      if (product(p) != cudaSuccess) return -1;
      cudaEventRecord(end_);
      if (cudaEventSynchronize(end_) != cudaSuccess) return -1;
      float ms = 0;
      cudaEventElapsedTime(&ms, begin_, end_);
      if (i >= kWarmUp) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e3;
  }

  int Compare(const LinearCudaParams& p, int64_t elements, int64_t copies) {
    std::vector<float> results[2];
    double us[2] = {};
    for (const bool own : {true, false}) {
      us[own] = Time(p, elements, copies, [&](const LinearCudaParams& params) {
        return own ? FewRowsLinearCuda(params, nullptr) : linear_.Gemm(params, nullptr);
      });
      if (us[own] < 0) return 1;
      results[own].resize(static_cast<size_t>(p.n * p.out));
      cudaMemcpy(results[own].data(), p.y, results[own].size() * 4, cudaMemcpyDefault);
    }
    const double bytes = 2.0 * static_cast<double>(elements);
    std::printf(
        "{\"kernel\": \"linear\", \"n\": %lld, \"in\": %lld, \"out\": %lld, \"own_us\": %.1f, "
        "\"own_tb_per_s\": %.2f, "
        "\"cublaslt_us\": %.1f, \"cublaslt_tb_per_s\": %.2f, \"relative_difference\": %.1e}\n",
        static_cast<long long>(p.n), static_cast<long long>(p.in), static_cast<long long>(p.out),
        us[1], bytes / us[1] / 1e6, us[0], bytes / us[0] / 1e6,
        RelativeError(results[1].data(), results[0].data(), p.n * p.out));
    return 0;
  }

  LinearCuda& linear_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

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
  kernels::Products products(**linear);
  int failed = 0;
  for (const auto& [in, out] : {std::pair<int64_t, int64_t>{4096, 6144},
                                {4096, 4096},
                                {4096, 28672},
                                {14336, 4096},
                                {4096, 128256}}) {
    failed += products.Measure(in, out, random);
  }
  return failed;
}
