// What:   fp16 bits of a float.
// Math:   rounded to nearest, ties to even; beyond 65,504 infinity, below 2^-25 zero; NaN stays NaN.
//         F16ToFloat (dtype.h) widens.
// Threads: reentrant.
#pragma once

#include <cstdint>

namespace carrel {

uint16_t FloatToF16(float x);

}  // namespace carrel
