#include "common/f16.h"

#include <cmath>

namespace carrel {

uint16_t FloatToF16(float x) {
  constexpr uint16_t kInfinity = 0x7c00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (std::isnan(x)) return sign | kInfinity | 0x200;
  if (size == 0) return sign;
  if (size >= 65520.0f) return sign | kInfinity;  // 65,504 and half a step
  // In steps of the number's own place, or of the smallest one there is; rint ties to even.
  int exponent = 0;
  std::frexp(size, &exponent);  // size in [2^(exponent - 1), 2^exponent)
  const int step = exponent - 11 > -24 ? exponent - 11 : -24;
  const auto steps = static_cast<uint32_t>(std::rint(std::ldexp(size, -step)));
  // 1,024 steps and more carry into the exponent by themselves.
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(step + 24) << 10) + steps));
}

}  // namespace carrel
