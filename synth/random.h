// What:   numbers drawn by counter: the same seed and index give the same number, in any order and
//         on any number of threads.
// Math:   normals are sums of four 16-bit uniforms with a cubic correction of the kurtosis; mean 0,
//         variance 1, fourth moment 2.89 (a true normal's: 3), |x| < 4.
// Cost:   about half a nanosecond a normal: loops without branches, compiled for wide vectors.
#pragma once

#include <cstdint>

// Compiled for several widths, chosen at run time; the sanitizers do not get on with the resolver.
#if defined(__x86_64__) && !defined(CARREL_SANITIZED)
#define CARREL_SYNTH_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CARREL_SYNTH_WIDE
#endif

namespace carrel::synth {

inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
inline uint64_t Mix(uint64_t a, uint64_t b) { return Mix(Mix(a) ^ b); }
inline uint64_t Mix(uint64_t a, uint64_t b, uint64_t c) { return Mix(Mix(a, b), c); }

// Uniform in [0, 1), and below a bound.
inline double Uniform(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }
inline int64_t Below(uint64_t bits, int64_t bound) {
  return static_cast<int64_t>(Uniform(bits) * static_cast<double>(bound));
}

void FillNormal(uint64_t seed, float* out, int64_t count);

}  // namespace carrel::synth
