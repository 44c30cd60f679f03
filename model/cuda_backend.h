// What:      the forward pass of a model's layers on a GPU, but for attention: what Backend is on
//            the CPU, on device memory. The two share no class: a GPU enqueues, keeps bf16 rows in
//            place and counts positions on the device
//            (docs/decisions/019-where-the-devices-part.md).
// Math:      products of bf16 operands with fp32 sums, or of f16 operands where the checkpoint is
//            f16; the hidden state, norms, RoPE and the gate in fp32; what enters a product is
//            rounded to its type, q, k, v and what attention gives to bf16.
// Shapes:    hidden [n, hidden_size] f32; q, attended [n, q_heads, head_dim] bf16; logits
//            [n, vocab_size] f32; contiguous device memory. n <= block_tokens.
// Errors:    Create: Unimplemented a shape that no kernel has (names it); ResourceExhausted device
//            memory; Unavailable no device. Later: what CUDA says.
// Bits:      up to tokens_alike() tokens get what each gets alone, bit for bit.
// Ownership: shares the weights with all others over the same checkpoint (cuda_weights.h), owns its
//            scratch.
// Threads:   one caller at a time. Every call enqueues on one stream and returns; all but Create
//            can be captured in a graph once they ran before with the same n.
// Cost:      Create allocates everything: the weights, if nobody holds them, and ScratchBytes().
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "common/thread_pool.h"
#include "kernels/kv_view.h"
#include "kernels/layer/linear/linear_cuda.h"
#include "kernels/layer/rope/rope_cuda.h"
#include "model/config.h"
#include "model/cuda_weights.h"
#include "model/rope_mode.h"

namespace carrel::model {

// Where fresh rows of a layer go, and where their tokens stand.
struct CudaPlacement {
  Position first_position = 0;
  int64_t first_row = 0;
  const int32_t* step = nullptr;  // device; added to both when the work runs, if not null
  kernels::KvRows kv;
  // [n], device: the row of q_exact that a token's query becomes, below 0: none. Null: its own.
  const int32_t* q_exact_rows = nullptr;
  // Of tokens of sequences of their own, [n], device: instead of all that stands before q_exact_rows.
  const kernels::RopeCudaRow* rows = nullptr;
};

class CudaBackend {
 public:
  // Device bytes that Create takes beside the weights.
  static int64_t ScratchBytes(const ModelConfig& config, int64_t block_tokens);
  // And with them.
  static int64_t Bytes(const ModelConfig& config, int64_t block_tokens) {
    return CudaWeights::Bytes(config) + ScratchBytes(config, block_tokens);
  }
  static constexpr int64_t tokens_alike() { return kernels::kFewRows; }
  // Ok, or why no GPU backend can be made here: no device, or a shape that it does not run.
  static absl::Status Check(const ModelConfig& config);

  // The adapter (may be null) is merged into the weights (cuda_weights.h). Rope kInfiniteHip: q
  // and k leave before RoPE, and positions of a placement do not count.
  static absl::StatusOr<std::unique_ptr<CudaBackend>> Create(
      const ModelConfig& config, const std::shared_ptr<const Weights>& weights,
      int64_t block_tokens, ThreadPool* pool,
      const std::shared_ptr<const Adapter>& adapter = nullptr, Rope rope = Rope::kTrained);
  // Over weights that somebody holds.
  static absl::StatusOr<std::unique_ptr<CudaBackend>> Create(
      const ModelConfig& config, std::shared_ptr<const CudaWeights> weights, int64_t block_tokens,
      Rope rope = Rope::kTrained);

  // ids: device; checked by the caller.
  absl::Status Embed(const int32_t* ids, int64_t n, float* hidden);
  // q_exact [n or fewer, q_heads, head_dim] f32: q before rounding; may be null.
  absl::Status ProjectQkv(Layer layer, const float* hidden, int64_t n,
                          const CudaPlacement& placement, void* q, float* q_exact);
  // The query alone, as Backend::ProjectQuery; of the placement only positions count.
  // drift [q_heads, head_dim] f32: added before RoPE; may be null.
  absl::Status ProjectQuery(Layer layer, const float* hidden, int64_t n,
                            const CudaPlacement& placement, const float* drift, void* q,
                            float* q_exact);
  absl::Status FinishLayer(Layer layer, const void* attended, int64_t n, float* hidden);
  absl::Status Logits(const float* hidden, int64_t n, float* logits);

  const ModelConfig& config() const { return config_; }
  const std::shared_ptr<const CudaWeights>& weights() const { return weights_; }
  const cuda::Stream& stream() const { return stream_; }
  int64_t block_tokens() const { return block_tokens_; }
  // Of RoPE, on the device; null where it is left out.
  const float* inv_freq() const { return rope_ == Rope::kTrained ? weights_->inv_freq() : nullptr; }

 private:
  CudaBackend(const ModelConfig& config, std::shared_ptr<const CudaWeights> weights,
              int64_t block_tokens, Rope rope);
  absl::Status Norm(const float* hidden, int64_t n, const float* w);
  absl::Status Linear(const CudaMatrix& matrix, const void* x, int64_t n, float* y,
                      bool accumulate);
  absl::Status Rotate(Layer layer, const CudaMatrix& matrix, int64_t n,
                      const CudaPlacement& placement, const float* drift, void* q, float* q_exact,
                      bool query_only);

  const ModelConfig config_;
  const std::shared_ptr<const CudaWeights> weights_;
  const int64_t block_tokens_;
  const Rope rope_;
  cuda::Stream stream_;
  cuda::DeviceBuffer<uint8_t> scratch_;
  std::unique_ptr<kernels::LinearCuda> linear_;
  // In scratch_.
  void* normed_ = nullptr;      // [block_tokens, hidden_size] of the weights' type
  float* projected_ = nullptr;  // [block_tokens]: q, k and v, and after them gate and up
  void* gated_ = nullptr;       // [block_tokens, intermediate_size], likewise
};

}  // namespace carrel::model
