#include "kernels/sparse_attention/sparse_attention.h"
namespace carrel::kernels {

void SparseAttention(const SparseAttentionParams& params) { RefSparseAttention(params); }

}  // namespace carrel::kernels
