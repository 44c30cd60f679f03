// What:   how far ahead products that read weights as a stream ask for them. Most hardware sees the
//         stream, but stops at each page of 4 KiB: asking makes a product a tenth to a fifth faster.
//         That of AMD's families 17h and 19h (Zen to Zen 4) goes on by itself, and asking costs up to a
//         third; but it loses the stream where the inputs do not fit the L1 cache beside it and are
//         read from the L2 cache for each row (decision 030).
//         LinesAhead: for memory of which no hardware foresees that it comes next.
// Ownership: nothing of that memory is read.
// Cost:   AskFor: a branch that is always the same.
#pragma once

#include <algorithm>
#include <cstdint>

namespace carrel::kernels {

inline const bool kStreamGoesOn = [] {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amdfam17h") != 0 || __builtin_cpu_is("amdfam19h") != 0;
#else
  return true;
#endif
}();

// Inputs that stay in an L1 cache of 32 KiB while rows stream through it.
inline constexpr int64_t kNearInputBytes = 24 << 10;

// Bytes ahead, or 0: not asked for. usual: where the stream ends at pages.
inline int64_t BytesAhead(int64_t input_bytes, int64_t usual) {
  if (!kStreamGoesOn) return usual;
  return input_bytes > kNearInputBytes ? 4096 : 0;
}

// Asking for what lies behind the last row is harmless. Into the L2 cache: the few places where the
// L1 cache notes what it waits for are left to the lines that are needed now.
inline __attribute__((always_inline)) void AskFor(const uint8_t* at, int64_t ahead) {
  if (ahead > 0) __builtin_prefetch(at + ahead, 0, 2);
}

// Asks for what lies ahead in so many steps: at once, it would hold up what is loaded meanwhile.
class LinesAhead {
 public:
  LinesAhead(const uint8_t* at, int64_t bytes, int64_t steps)
      : at_(at), end_(at + bytes), step_((bytes + 64 * steps - 1) / (64 * steps) * 64) {}

  inline __attribute__((always_inline)) void AskForSome() {
    const uint8_t* const to = std::min(end_, at_ + step_);
    for (; at_ < to; at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const uint8_t* at_;
  const uint8_t* const end_;
  const int64_t step_;
};

}  // namespace carrel::kernels
