// What:   whether products that read weights as a stream should ask for what lies ahead. Intel's
//         hardware sees the stream, but stops at each page of 4 KiB: asked 2 to 4 KiB ahead, a
//         product is a tenth to a fifth faster there. AMD's goes on by itself, and asking costs a
//         third (decision 030).
// Cost:   a branch that is always the same.
#pragma once

#include <cstdint>

namespace carrel::kernels {

inline const bool kAskAhead = [] {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
#else
  return false;
#endif
}();

// The line kBytes behind `at`; asking for what lies behind the last row is harmless. Into the L2
// cache: the few places where the L1 cache notes what it waits for are left to the lines that are
// needed now.
template <int64_t kBytes>
inline __attribute__((always_inline)) void AskAhead(const uint8_t* at) {
  if (kAskAhead) __builtin_prefetch(at + kBytes, 0, 2);
}

}  // namespace carrel::kernels
