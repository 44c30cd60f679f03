// What:   InfiniteHiP's attention of prefill on a GPU: what SparseAttention (sparse_attention.h) does
//         on a CPU, for the tokens of a chunk at a time, whose layer's rows are complete already.
// Math:   that of sparse_attention.h, on K, V and queries rounded to bf16; keys that are turned are
//         rounded again. Rows are the CPU's but for ties within that rounding.
// Errors: Check: Unimplemented a shape or kind that no kernel has (names it). Later: what CUDA says.
// Ownership: of its memory.
// Threads: one caller; enqueues on the stream it is given, of which one at a time.
// Cost:   of a block and KV head the keys of kernels/select/block_prune and the attention of
//         kernels/attention/block_sparse_attention. Memory: Bytes(): scores of tokens / 256 chunks for
//         each block of a chunk and KV head, and 4 bytes * head_dim per trained position.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/cuda/stream.h"
#include "kernels/kv_view.h"
#include "model/config.h"
#include "prefill/attention_config.h"

namespace carrel::prefill {

class CudaSparseAttention {
 public:
  virtual ~CudaSparseAttention() = default;

  static absl::Status Check(const AttentionConfig& config, const AttentionShape& shape);
  // tokens: of the document; chunk: at most that attend at once, a multiple of block_q or tokens.
  static int64_t Bytes(const AttentionConfig& config, const model::ModelConfig& model,
                       int64_t tokens, int64_t chunk);
  static absl::StatusOr<std::unique_ptr<CudaSparseAttention>> Create(
      const AttentionConfig& config, const model::ModelConfig& model, int64_t tokens,
      int64_t chunk);

  // Tokens [first, first + n): q, out [n, q_heads, head_dim]; kv: the rows of all tokens.
  virtual absl::Status Attend(Layer layer, const kernels::Bf16* q, const kernels::KvView& kv,
                              Position first, int64_t n, kernels::Bf16* out,
                              const cuda::Stream& stream) = 0;
};

}  // namespace carrel::prefill
