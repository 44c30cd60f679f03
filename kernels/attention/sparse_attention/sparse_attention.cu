#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/decode_attention-inl.cuh"

namespace carrel::kernels {
namespace {

bool Served(const SparseAttentionCudaParams& p) {
  return DecodeServed(p) && p.rows <= p.ids_stride &&
         p.ids_stride <= INT32_MAX - 2 * kDecodeWarps * kDecodeTile;
}

DecodeArgs ArgsOf(const SparseAttentionCudaParams& p) {
  DecodeArgs a = DecodeArgsOf(p);
  a.ids = p.ids;
  a.ids_stride = p.ids_stride;
  a.row_count_stride = 1;
  return a;
}

}  // namespace

cudaError_t SparseAttentionCuda(std::span<const SparseAttentionCudaParams> all,
                                cudaStream_t stream) {
  return DecodeAttention<true>(all, Served, ArgsOf, stream);
}

}  // namespace carrel::kernels
