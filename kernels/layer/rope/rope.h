// What:   rotary position embedding, in place, of queries or keys.
// Math:   with h = head_dim / 2, a = position * inv_freq[c]: x[c] <- x[c] cos a - x[c + h] sin a;
//         x[c + h] <- x[c + h] cos a + x[c] sin a.
// Source: Su et al. 2021; the half-split layout of Hugging Face checkpoints.
// Shapes: x [n, heads, head_dim] f32 contiguous; inv_freq [head_dim / 2] f32. Token i stands at
//         first_position + i.
// Units:  the angle is position (float) * inv_freq (float) rounded to float, as transformers
//         computes it; cos and sin of that float.
// Edge:   head_dim is even.
// Threads: reentrant; a token's result does not depend on n.
#pragma once

#include <cstdint>

namespace carrel::kernels {

void Rope(float* x, int64_t n, int64_t heads, int64_t head_dim, int64_t first_position,
          const float* inv_freq);
void RefRope(float* x, int64_t n, int64_t heads, int64_t head_dim, int64_t first_position,
             const float* inv_freq);

}  // namespace carrel::kernels
