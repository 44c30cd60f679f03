#include "synth/random.h"

namespace carrel::synth {
namespace {

inline uint32_t Mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

}  // namespace

CARREL_SYNTH_WIDE
void FillNormal(uint64_t seed, float* out, int64_t count) {
  const auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
  // Of four uniforms of 16 bits: sqrt(4 (2^32 - 1) / 12).
  constexpr float kRootOfVariance = 37837.227f;
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<uint32_t>(i) * 0x9e3779b9u;
    const uint32_t a = Mix32(at + low), b = Mix32((at ^ 0x7f4a7c15u) + high);
    const auto sum = static_cast<int32_t>((a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16));
    const float x = static_cast<float>(sum - 131070) * (1 / kRootOfVariance);
    // Cornish and Fisher: excess kurtosis -0.3 of the sum. What it takes from the variance comes
    // back.
    out[i] = 1.0033f * (x + 0.0125f * (x * x * x - 3 * x));
  }
}

}  // namespace carrel::synth
