// What:    everything of a transformer layer that is not attention: the seam between the forward
//          pass and the device that computes it.
//          The CPU's; CudaBackend (cuda_backend.h) does the same on device memory and shares no
//          class with it (docs/decisions/019-where-the-devices-part.md).
// Shapes:  hidden [n, hidden_size]; q [n, q_heads, head_dim]; k, v [n, kv_heads, head_dim]; all
//          f32, contiguous, in the backend's memory.
// Errors:  InvalidArgument a token id outside the vocabulary; device failures by their own code.
// Threads: one caller at a time per Backend object; weights are shared by all.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "model/config.h"

namespace carrel::model {

// Consecutive tokens of one sequence: token i stands at first_position + i.
struct TokenBlock {
  Position first_position = 0;
  int64_t n = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const ModelConfig& config() const = 0;

  virtual absl::Status Embed(absl::Span<const TokenId> tokens, float* hidden) = 0;

  // The most tokens for which this is batch-invariant; at least 1.
  virtual int64_t tokens_alike() const = 0;

  // q, k, v = W norm(hidden) (+ bias, per-head norm), RoPE on q and k. The tokens of all blocks lie
  // one after the other.
  virtual absl::Status ProjectQkv(Layer layer, const float* hidden,
                                  absl::Span<const TokenBlock> blocks, float* q, float* k,
                                  float* v) = 0;
  absl::Status ProjectQkv(Layer layer, const float* hidden, int64_t n, Position first_position,
                          float* q, float* k, float* v) {
    return ProjectQkv(layer, hidden, {{first_position, n}}, q, k, v);
  }

  // q alone: with the hidden state that enters an *earlier* layer this is the predicted query that
  // asks ahead (docs/decisions/026).
  virtual absl::Status ProjectQuery(Layer layer, const float* hidden, int64_t n,
                                    Position first_position, float* q) = 0;

  // hidden += W_o attended;  hidden += mlp(norm(hidden)).  attended [n, q_heads, head_dim]. What is
  // added is normalised first where the model says so (Gemma).
  virtual absl::Status FinishLayer(Layer layer, const float* attended, int64_t n,
                                   float* hidden) = 0;

  // Final norm and head; logits [n, vocab_size].
  virtual absl::Status Logits(const float* hidden, int64_t n, float* logits) = 0;
};

}  // namespace carrel::model
