#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/decode_attention-inl.cuh"

namespace carrel::kernels {

int64_t DecodeSplits(int64_t max_rows, int64_t kv_heads) {
  // Blocks that keep an SM's memory pipe full, and the rows below which one more part costs more in
  // joining than it saves (both measured).
  constexpr int64_t kBlocksPerSm = 2, kMinPartRows = 2 * kDecodeWarps * kDecodeTile;
  const int64_t filling =
      std::max<int64_t>(1, Multiprocessors() * kBlocksPerSm / std::max<int64_t>(1, kv_heads));
  const int64_t useful = (max_rows + kMinPartRows - 1) / kMinPartRows;
  return std::clamp<int64_t>(useful, 1, std::min(filling, kMaxDecodeSplits));
}

size_t DecodeWorkspaceBytes(int64_t kv_heads, int64_t group, int64_t head_dim, int64_t splits) {
  return DecodeCounterBytes(kv_heads) +
         static_cast<size_t>(kv_heads * splits * group) * (head_dim + 2) * sizeof(float);
}

cudaError_t WindowAttentionCuda(std::span<const WindowAttentionCudaParams> all,
                                cudaStream_t stream) {
  const auto served = [](const WindowAttentionCudaParams& p) {
    return DecodeServed(p) && p.rows <= p.kv.row_stride &&
           p.kv.row_stride <= INT32_MAX - 2 * kDecodeWarps * kDecodeTile;
  };
  return DecodeAttention<false>(all, served, DecodeArgsOf<WindowAttentionCudaParams>, stream);
}

}  // namespace carrel::kernels
