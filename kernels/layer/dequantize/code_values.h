// What:   the values that an element of a quantised block could take with the block's scales as they
//         are: what a quantiser chose from.
// Math:   a block's codes all set to the same number, and widened: with level c = 0 .. levels - 1,
//         out[i] is what element i would be if its code were c. Not in the order of values.
// Shapes: block: block_bytes of TraitsOf(type); out [block_elements].
// Threads: reentrant.     Cost: that of widening a block.
#pragma once

#include "kernels/layer/dequantize/dequantize.h"

namespace carrel::kernels {

// Codes of a quantised type: 4 (Q2_K) to 256 (Q8_0).
int CodeLevels(GgufType type);

void CodeValues(GgufType type, const void* block, int level, float* out);

}  // namespace carrel::kernels
