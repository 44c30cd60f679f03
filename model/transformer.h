// What:    the forward pass of one layer, with attention plugged in: dense for prefill
//          (prefill/dense_attention.h), retrieval for decoding (decoder/runner/cpu_runner.cc).
// Ownership: the backend outlives it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/backend.h"

namespace carrel::model {

// New tokens [first_position, first_position + n) of one layer, after RoPE. Pointers are valid
// during Attend only.
struct AttentionInput {
  Layer layer;
  Position first_position = 0;
  int64_t n = 0;
  const float* q = nullptr;  // [n, q_heads, head_dim]
  const float* k = nullptr;  // [n, kv_heads, head_dim]
  const float* v = nullptr;  // [n, kv_heads, head_dim]
};

class Attention {
 public:
  virtual ~Attention() = default;
  // Takes in the new k and v and computes attended [n, q_heads, head_dim]: token i attends to what
  // comes before it and to itself.
  virtual absl::Status Attend(const AttentionInput& input, float* attended) = 0;
  // Takes them in, and nothing else.
  virtual absl::Status Collect(const AttentionInput&) {
    return absl::UnimplementedError("this attention is no collector of rows");
  }
};

// What the blocks of several sequences attend to.
class SequencesAttention {
 public:
  virtual ~SequencesAttention() = default;
  // One input per block, whose q, k and v lie one after the other, as attended does.
  virtual absl::Status Attend(absl::Span<const AttentionInput> inputs, float* attended) = 0;
};

// Runs layers over blocks of tokens; owns the block's scratch, nothing else.   Threads: one at a
// time.
class Transformer {
 public:
  explicit Transformer(Backend* backend) : backend_(*backend) {}

  // hidden [n, hidden_size]: in, what enters the layer; out, what leaves it.
  absl::Status ForwardLayer(Layer layer, int64_t n, Position first_position, float* hidden,
                            Attention& attention);
  // Of several sequences, whose tokens lie one after the other: weights are read once for all.
  absl::Status ForwardLayer(Layer layer, absl::Span<const TokenBlock> blocks, float* hidden,
                            SequencesAttention& attention);
  // Of the layer only q, k and v, for attention.Collect; hidden stays as it is.
  absl::Status ProjectLayer(Layer layer, int64_t n, Position first_position, const float* hidden,
                            Attention& attention);

  Backend& backend() { return backend_; }
  const ModelConfig& config() const { return backend_.config(); }

 private:
  // Into q_, k_ and v_.
  absl::Status Project(Layer layer, absl::Span<const TokenBlock> blocks, const float* hidden);
  // What was projected of a block whose first token is the `begin`-th.
  AttentionInput InputOf(Layer layer, const TokenBlock& block, int64_t begin) const;

  Backend& backend_;
  std::vector<AttentionInput> inputs_;
  std::vector<float> q_, k_, v_, attended_;
};

}  // namespace carrel::model
