// What:  rates of causal prefill attention, shape of an 8B model (32/8 heads of 128) and of d 64:
//        every variant, whole and as the last chunk of a long document. Checked against each other
//        first.
// Usage: prefill_attention_gpu_bench     one JSON object a line
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "common/bf16.h"
#include "common/cuda/buffer.h"
#include "common/cuda/runtime.h"
#include "common/test_random.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"

namespace carrel::kernels {
namespace {

using Variant = PrefillAttentionVariant;

struct Case {
  int64_t n, first;
  int32_t q_heads, kv_heads, head_dim;
};

// Repeats a block of random numbers with a shift: the generator is slower than the device.
std::vector<uint16_t> RandomRows(std::mt19937_64& rng, int64_t count) {
  const std::vector<float> seedlings = RandomNormal(rng, 1 << 20);
  std::vector<uint16_t> rows(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    rows[i] = FloatToBf16(seedlings[static_cast<size_t>(i + (i >> 20) * 977) & ((1 << 20) - 1)]);
  }
  return rows;
}

cuda::DeviceBuffer<uint16_t> Upload(const std::vector<uint16_t>& values) {
  auto buffer = cuda::DeviceBuffer<uint16_t>::Create(static_cast<int64_t>(values.size()));
  if (!buffer.ok()) {
    std::fprintf(stderr, "%s\n", buffer.status().ToString().c_str());
    std::exit(1);
  }
  cudaMemcpy(buffer->data(), values.data(), values.size() * 2, cudaMemcpyDefault);
  return *std::move(buffer);
}

double MedianMs(const PrefillAttentionCudaParams& p, Variant variant, int repetitions) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < repetitions + 2; ++i) {
    cudaEventRecord(begin);
    if (PrefillAttentionCuda(p, nullptr, variant) != cudaSuccess) return -1;
    cudaEventRecord(end);
    if (cudaEventSynchronize(end) != cudaSuccess) return -1;
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 2) times.push_back(ms);  // warm
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void Measure(std::mt19937_64& rng, const Case& c) {
  const int64_t rows = c.first + c.n, d = c.head_dim;
  const auto q = Upload(RandomRows(rng, c.n * c.q_heads * d));
  const auto k = Upload(RandomRows(rng, c.kv_heads * rows * d));
  const auto v = Upload(RandomRows(rng, c.kv_heads * rows * d));
  PrefillAttentionCudaParams p;
  p.q = q.data();
  p.kv = {k.data(), v.data(), rows};
  p.n = c.n;
  p.first_position = c.first;
  p.rows = rows;
  p.q_heads = c.q_heads;
  p.kv_heads = c.kv_heads;
  p.head_dim = c.head_dim;
  p.scale = 1.0f / std::sqrt(static_cast<float>(d));
  std::vector<std::vector<uint16_t>> outputs;
  double error = 0;
  const double keys = static_cast<double>(c.n) * (static_cast<double>(c.first) + 0.5 * (c.n + 1));
  const double flops = 4.0 * keys * static_cast<double>(d) * c.q_heads;
  for (const auto& [variant, name] :
       {std::pair{Variant::kMma, "mma"}, {Variant::kWgmma, "wgmma"}}) {
    if (!PrefillAttentionHas(variant, c.head_dim)) continue;
    auto out = cuda::DeviceBuffer<uint16_t>::Create(c.n * c.q_heads * d);
    cudaMemset(out->data(), 0xff, static_cast<size_t>(out->bytes()));
    p.out = out->data();
    const double ms = MedianMs(p, variant, 10);
    std::vector<uint16_t> values(static_cast<size_t>(out->size()));
    cudaMemcpy(values.data(), out->data(), values.size() * 2, cudaMemcpyDefault);
    outputs.push_back(std::move(values));
    if (outputs.size() == 2) {
      double difference = 0, norm = 0;
      for (size_t i = 0; i < outputs[0].size(); ++i) {
        const double a = Bf16ToFloat(outputs[0][i]), b = Bf16ToFloat(outputs[1][i]);
        difference += (a - b) * (a - b);
        norm += a * a;
      }
      error = std::sqrt(difference / norm);
    }
    std::printf(
        "{\"kernel\": \"prefill_attention\", \"variant\": \"%s\", \"n\": %lld, \"first\": %lld, "
        "\"q_heads\": %d, \"kv_heads\": %d, \"head_dim\": %d, \"ms\": %.3f, \"tflops\": %.1f, "
        "\"relative_difference_to_mma\": %.2e}\n",
        name, static_cast<long long>(c.n), static_cast<long long>(c.first), c.q_heads, c.kv_heads,
        c.head_dim, ms, flops / ms / 1e9, error);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace carrel::kernels

int main() {
  std::mt19937_64 rng(carrel::TestSeed());
  using carrel::kernels::Measure;
  Measure(rng, {8192, 0, 32, 8, 128});
  Measure(rng, {32768, 0, 32, 8, 128});
  Measure(rng, {8192, 122880, 32, 8, 128});
  Measure(rng, {32768, 0, 32, 8, 64});
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
