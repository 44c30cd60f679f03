// gpu_bench [--quick] [decode | select | refine | term]...: GPU kernels, checked and then timed; one JSON
// object a line. Without a name, all of them.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "bench/gpu/harness.h"
#include "common/test_random.h"

int main(int argc, char** argv) {
  using namespace carrel::gpu_bench;
  std::set<std::string> wanted(argv + 1, argv + argc);
  const bool quick = wanted.erase("--quick") > 0;
  for (const std::string& name : wanted) {
    if (name == "decode" || name == "select" || name == "refine" || name == "term") continue;
    std::fprintf(stderr, "usage: gpu_bench [--quick] [decode | select | refine | term]...\n");
    return 2;
  }
  const auto runs = [&](const char* name) { return wanted.empty() || wanted.count(name) > 0; };
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
  if (runs("decode")) DecodeBenches(bench);
  if (runs("select")) SelectBenches(bench);
  if (runs("refine")) RefineBenches(bench);
  if (runs("term")) TermBenches(bench);
  return 0;
}
