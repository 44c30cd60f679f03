// gpu_bench [--quick]: every GPU kernel, checked and then timed; one JSON object a line.
#include <cstdio>
#include <cstring>

#include "bench/gpu/harness.h"
#include "common/test_random.h"

int main(int argc, char** argv) {
  using namespace carrel::gpu_bench;
  const bool quick = argc == 2 && std::strcmp(argv[1], "--quick") == 0;
  if (argc > 2 || (argc == 2 && !quick)) {
    std::fprintf(stderr, "usage: gpu_bench [--quick]\n");
    return 2;
  }
  cudaDeviceProp device;
  CARREL_CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  const char* fixed = std::getenv("CARREL_SEED");
  const uint64_t seed =
      fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
  Bench bench(seed, quick);
  std::printf(
      "{\"device\": \"%s\", \"sms\": %d, \"l2_bytes\": %d, \"seed\": %llu, \"copy_gb_per_s\": "
      "%.1f, "
      "\"read_gb_per_s\": %.1f, \"gemm_tflop_per_s\": %.1f}\n",
      device.name, device.multiProcessorCount, device.l2CacheSize,
      static_cast<unsigned long long>(seed), bench.CopyBytesPerS() * 1e-9,
      bench.ReadBytesPerS() * 1e-9, bench.GemmFlops() * 1e-12);
  DecodeBenches(bench);
  SelectBenches(bench);
  return 0;
}
