#include "kernels/rope/rope.h"
namespace carrel::kernels {

void Rope(float* x, int64_t n, int64_t heads, int64_t head_dim, int64_t first_position,
          const float* inv_freq) {
  RefRope(x, n, heads, head_dim, first_position, inv_freq);
}

}  // namespace carrel::kernels
