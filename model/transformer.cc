#include "model/transformer.h"

#include "common/status.h"

namespace carrel::model {
namespace {

// Grows only: block after block of the same size allocates once.
void Reserve(std::vector<float>& buffer, int64_t floats) {
  if (static_cast<int64_t>(buffer.size()) < floats) buffer.resize(static_cast<size_t>(floats));
}

}  // namespace

absl::Status Transformer::Project(Layer layer, absl::Span<const TokenBlock> blocks,
                                  const float* hidden) {
  int64_t n = 0;
  for (const TokenBlock& block : blocks) {
    CARREL_CHECK(block.n >= 0 && block.first_position >= 0);
    n += block.n;
  }
  const AttentionShape& shape = config().shape;
  Reserve(q_, n * shape.q_heads * shape.head_dim);
  Reserve(k_, n * shape.kv_heads * shape.head_dim);
  Reserve(v_, n * shape.kv_heads * shape.head_dim);
  return backend_.ProjectQkv(layer, hidden, blocks, q_.data(), k_.data(), v_.data());
}

AttentionInput Transformer::InputOf(Layer layer, const TokenBlock& block, int64_t begin) const {
  const AttentionShape& shape = config().shape;
  AttentionInput input;
  input.layer = layer;
  input.first_position = block.first_position;
  input.n = block.n;
  input.q = q_.data() + begin * shape.q_heads * shape.head_dim;
  input.k = k_.data() + begin * shape.kv_heads * shape.head_dim;
  input.v = v_.data() + begin * shape.kv_heads * shape.head_dim;
  return input;
}

absl::Status Transformer::ForwardLayer(Layer layer, absl::Span<const SequenceBlock> blocks,
                                       float* hidden) {
  blocks_.clear();
  int64_t n = 0;
  for (const SequenceBlock& block : blocks) {
    blocks_.push_back(block.tokens);
    n += block.tokens.n;
  }
  if (n == 0) return absl::OkStatus();
  RETURN_IF_ERROR(Project(layer, blocks_, hidden));
  const int64_t width = config().shape.q_heads * config().shape.head_dim;
  Reserve(attended_, n * width);
  int64_t begin = 0;
  for (const SequenceBlock& block : blocks) {
    RETURN_IF_ERROR(block.attention->Attend(InputOf(layer, block.tokens, begin),
                                            attended_.data() + begin * width));
    begin += block.tokens.n;
  }
  return backend_.FinishLayer(layer, attended_.data(), n, hidden);
}

absl::Status Transformer::ProjectLayer(Layer layer, int64_t n, Position first_position,
                                       const float* hidden, Attention& attention) {
  if (n == 0) return absl::OkStatus();
  const TokenBlock block = {first_position, n};
  RETURN_IF_ERROR(Project(layer, {&block, 1}, hidden));
  return attention.Collect(InputOf(layer, block, 0));
}

}  // namespace carrel::model
