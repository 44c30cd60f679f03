// What:   bf16 as its 16 bits, to and from float.
// Math:   rounds to nearest even; NaN stays NaN; widening is exact.
#pragma once

#include <bit>
#include <cstdint>

namespace carrel {

inline float Bf16ToFloat(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

inline uint16_t FloatToBf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40);  // quiet NaN
  bits += 0x7fffu + ((bits >> 16) & 1);
  return static_cast<uint16_t>(bits >> 16);
}

}  // namespace carrel
