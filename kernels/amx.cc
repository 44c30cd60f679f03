#include "kernels/amx.h"

#include <atomic>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace carrel::kernels {
namespace {

#if defined(__x86_64__) && defined(__linux__)

constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM of Linux 5.16
constexpr long kTileData = 18;               // the state component of the tiles' contents

// AVX-512 itself, and that the system keeps its state, are what Highway asks too.
bool CpuHasTiles() {
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return false;
  }
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tiles, 8-bit integers
  if ((d & kAmx) != kAmx) return false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  return (a & kAvx512Bf16) != 0;
}

// A system that does not know the request, or a thread whose signal stack is too small for the
// tiles, refuses.
bool Probe() {
  const char* const wish = std::getenv("CARREL_AMX");
  if (wish != nullptr && std::strcmp(wish, "off") == 0) return false;
  return CpuHasTiles() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool Probe() { return false; }

#endif

std::atomic<bool> switched_off{false};

}  // namespace

bool AmxAvailable() {
  static const bool available = Probe();
  return available;
}

bool AmxUsed() { return !switched_off.load(std::memory_order_relaxed) && AmxAvailable(); }

void SetAmxUsedForTest(bool used) { switched_off.store(!used, std::memory_order_relaxed); }

}  // namespace carrel::kernels
