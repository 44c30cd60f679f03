// What:   the values that 4-bit numbers of some types stand for.
#pragma once

#include <bit>
#include <cstdint>

namespace carrel::kernels {

// Steps of a normal distribution (IQ4_NL, IQ4_XS), and of a 4-bit float (MXFP4), doubled.
inline constexpr int8_t kNormalSteps[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                            1,    13,   25,  38,  53,  69,  89,  113};
inline constexpr int8_t kFloat4Steps[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};

// The scale of an MXFP4 block is a power of two, 2^(e - 128) with the doubled steps. Below 2^-126 a
// float is denormal: 2^-128 and 2^-127.
inline float Mxfp4Scale(uint8_t e) {
  return std::bit_cast<float>(e < 2 ? 0x00200000u << e : (uint32_t{e} - 1) << 23);
}

}  // namespace carrel::kernels
