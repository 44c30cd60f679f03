#include "kernels/topk/topk.h"
namespace carrel::kernels {

int64_t TopK(const float* scores, int64_t n, int64_t k, int64_t* out, std::vector<uint32_t>&) {
  return RefTopK(scores, n, k, out);
}

}  // namespace carrel::kernels
