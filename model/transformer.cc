#include "model/transformer.h"

#include "common/status.h"

namespace carrel::model {
namespace {

// Grows only: block after block of the same size allocates once.
void Reserve(std::vector<float>& buffer, int64_t floats) {
  if (static_cast<int64_t>(buffer.size()) < floats) buffer.resize(static_cast<size_t>(floats));
}

class OneSequence final : public SequencesAttention {
 public:
  explicit OneSequence(Attention& attention) : attention_(attention) {}
  absl::Status Attend(absl::Span<const AttentionInput> inputs, float* attended) override {
    return attention_.Attend(inputs[0], attended);
  }

 private:
  Attention& attention_;
};

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

absl::Status Transformer::ForwardLayer(Layer layer, absl::Span<const TokenBlock> blocks,
                                       float* hidden, SequencesAttention& attention) {
  int64_t n = 0;
  for (const TokenBlock& block : blocks) n += block.n;
  if (n == 0) return absl::OkStatus();
  RETURN_IF_ERROR(Project(layer, blocks, hidden));
  Reserve(attended_, n * config().shape.q_heads * config().shape.head_dim);
  inputs_.clear();
  int64_t begin = 0;
  for (const TokenBlock& block : blocks) {
    inputs_.push_back(InputOf(layer, block, begin));
    begin += block.n;
  }
  RETURN_IF_ERROR(attention.Attend(inputs_, attended_.data()));
  return backend_.FinishLayer(layer, attended_.data(), n, hidden);
}

absl::Status Transformer::ForwardLayer(Layer layer, int64_t n, Position first_position,
                                       float* hidden, Attention& attention) {
  OneSequence one(attention);
  const TokenBlock block = {first_position, n};
  return ForwardLayer(layer, {&block, 1}, hidden, one);
}

absl::Status Transformer::ProjectLayer(Layer layer, int64_t n, Position first_position,
                                       const float* hidden, Attention& attention) {
  if (n == 0) return absl::OkStatus();
  const TokenBlock block = {first_position, n};
  RETURN_IF_ERROR(Project(layer, {&block, 1}, hidden));
  return attention.Collect(InputOf(layer, block, 0));
}

}  // namespace carrel::model
