// What:   random directions for binary codes, the same on every device.
// Math:   rows of an orthonormal basis of head_dim, as many bases as it takes; rounded to bf16, as
//         a GPU's tensor cores want them.
// Shapes: [bits, d] f32.
#pragma once

#include <cstdint>
#include <vector>

namespace carrel::decoder {

std::vector<float> RandomRotations(int64_t bits, int64_t d, uint64_t seed);

}  // namespace carrel::decoder
