#include "bench/gpu/harness.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace carrel::gpu_bench {

void Check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "gpu_bench: %s: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}

Bench::Bench(uint64_t seed, bool quick) : rng_(seed), quick_(quick) {
  CARREL_CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
}

Timing Bench::Time(int64_t count, const std::function<cudaError_t(int64_t, cudaStream_t)>& launch) {
  const int kWarmup = 3, runs = quick_ ? 10 : 40;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CARREL_CHECK_CUDA(cudaDeviceSynchronize());
  CARREL_CHECK_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  for (int64_t i = 0; i < count; ++i) Check(launch(i, stream_), "launch");
  CARREL_CHECK_CUDA(cudaStreamEndCapture(stream_, &graph));
  CARREL_CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  CARREL_CHECK_CUDA(cudaEventCreate(&start));
  CARREL_CHECK_CUDA(cudaEventCreate(&stop));
  std::vector<double> us;
  for (int run = 0; run < kWarmup + runs; ++run) {
    CARREL_CHECK_CUDA(cudaEventRecord(start, stream_));
    CARREL_CHECK_CUDA(cudaGraphLaunch(exec, stream_));
    CARREL_CHECK_CUDA(cudaEventRecord(stop, stream_));
    CARREL_CHECK_CUDA(cudaStreamSynchronize(stream_));
    float ms = 0;
    CARREL_CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
    if (run >= kWarmup) us.push_back(ms * 1000.0 / static_cast<double>(count));
  }
  CARREL_CHECK_CUDA(cudaEventDestroy(start));
  CARREL_CHECK_CUDA(cudaEventDestroy(stop));
  CARREL_CHECK_CUDA(cudaGraphExecDestroy(exec));
  CARREL_CHECK_CUDA(cudaGraphDestroy(graph));
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() / 10], us[us.size() * 9 / 10]};
}

double Bench::CopyBytesPerS() {
  if (copy_ == 0) {
    constexpr int64_t kBytes = int64_t{2} << 30;
    void *from = nullptr, *to = nullptr;
    CARREL_CHECK_CUDA(cudaMalloc(&from, kBytes));
    CARREL_CHECK_CUDA(cudaMalloc(&to, kBytes));
    CARREL_CHECK_CUDA(FillBits(static_cast<uint32_t*>(from), kBytes / 4, rng_()));
    const Timing t =
        Time(2, [&](int64_t, cudaStream_t stream) { return CopyAll(from, to, kBytes, stream); });
    copy_ = 2.0 * kBytes / (t.us * 1e-6);
    const Timing read = Time(2, [&](int64_t i, cudaStream_t stream) {
      return ReadAll(i == 0 ? from : to, kBytes, static_cast<uint32_t*>(to), stream);
    });
    read_ = kBytes / (read.us * 1e-6);
    CARREL_CHECK_CUDA(cudaFree(from));
    CARREL_CHECK_CUDA(cudaFree(to));
  }
  return copy_;
}

double Bench::ReadBytesPerS() {
  CopyBytesPerS();
  return read_;
}

double Bench::GemmFlops() {
  if (gemm_ == 0) gemm_ = MeasureGemmFlops(*this);
  return gemm_;
}

void Bench::Report(const Result& r) {
  const double rate = r.bytes / (r.time.us * 1e-6);
  std::printf(
      "{\"kernel\": \"%s\", \"shape\": \"%s\", \"n\": %lld, \"us\": %.2f, \"us_p10\": %.2f, "
      "\"us_p90\": %.2f, \"bytes\": %.0f, \"gb_per_s\": %.1f, \"share_of_copy\": %.4f, "
      "\"share_of_read\": %.4f",
      r.kernel.c_str(), r.shape.c_str(), static_cast<long long>(r.n), r.time.us, r.time.us_p10,
      r.time.us_p90, r.bytes, rate * 1e-9, rate / CopyBytesPerS(), rate / ReadBytesPerS());
  if (r.flops > 0) {
    const double flops = r.flops / (r.time.us * 1e-6);
    std::printf(", \"tflop_per_s\": %.1f", flops * 1e-12);
    if (GemmFlops() > 0) std::printf(", \"share_of_gemm\": %.4f", flops / GemmFlops());
  }
  if (!r.error_of.empty()) {
    std::printf(", \"error\": %.3g, \"error_of\": \"%s\"", r.error, r.error_of.c_str());
  }
  std::printf("}\n");
  std::fflush(stdout);
}

void Bench::Expect(const std::string& what, double error, double bound) {
  if (error <= bound) return;  // NaN fails
  std::fprintf(stderr, "gpu_bench: %s: error %g, allowed %g\n", what.c_str(), error, bound);
  std::exit(1);
}

}  // namespace carrel::gpu_bench
