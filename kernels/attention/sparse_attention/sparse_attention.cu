#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/decode_attention-inl.cuh"

namespace carrel::kernels {

cudaError_t SparseAttentionCuda(const SparseAttentionCudaParams& p, cudaStream_t stream) {
  if (p.rows > p.ids_stride || p.ids_stride > INT32_MAX - 2 * kDecodeWarps * kDecodeTile) {
    return cudaErrorInvalidValue;
  }
  DecodeArgs a = {};
  a.q = p.q;
  a.kv = p.kv;
  a.ids = p.ids;
  a.row_count = p.row_count;
  a.ids_stride = p.ids_stride;
  a.row_count_stride = 1;
  a.rows = static_cast<int>(p.rows);
  a.group = static_cast<int>(p.group);
  a.scale = p.scale;
  a.out = p.out;
  a.lse = p.lse;
  return LaunchDecodeAttention<true>(a, p.kv_heads, p.head_dim, p.splits, p.workspace, stream);
}

}  // namespace carrel::kernels
