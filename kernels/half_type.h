// What: the two 16-bit floats that weights, and what is multiplied by them, may have on a GPU.
//       f16 saturates: what is beyond 65,504 becomes that, as bf16 it would still be finite.
#pragma once

#include <cstdint>

namespace carrel::kernels {

enum class HalfType : uint8_t { kBf16 = 0, kF16 = 1 };

}  // namespace carrel::kernels
