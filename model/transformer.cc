#include "model/transformer.h"

#include "common/status.h"

namespace carrel::model {
namespace {

// Grows only: block after block of the same size allocates once.
void Reserve(std::vector<float>& buffer, int64_t floats) {
  if (static_cast<int64_t>(buffer.size()) < floats) buffer.resize(static_cast<size_t>(floats));
}

}  // namespace

absl::StatusOr<AttentionInput> Transformer::Project(Layer layer, int64_t n, Position first_position,
                                                    const float* hidden) {
  CARREL_CHECK(n >= 0 && first_position >= 0);
  const AttentionShape& shape = config().shape;
  Reserve(q_, n * shape.q_heads * shape.head_dim);
  Reserve(k_, n * shape.kv_heads * shape.head_dim);
  Reserve(v_, n * shape.kv_heads * shape.head_dim);
  RETURN_IF_ERROR(
      backend_.ProjectQkv(layer, hidden, n, first_position, q_.data(), k_.data(), v_.data()));
  AttentionInput input;
  input.layer = layer;
  input.first_position = first_position;
  input.n = n;
  input.q = q_.data();
  input.k = k_.data();
  input.v = v_.data();
  return input;
}

absl::Status Transformer::ForwardLayer(Layer layer, int64_t n, Position first_position,
                                       float* hidden, Attention& attention) {
  if (n == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const AttentionInput input, Project(layer, n, first_position, hidden));
  Reserve(attended_, n * config().shape.q_heads * config().shape.head_dim);
  RETURN_IF_ERROR(attention.Attend(input, attended_.data()));
  return backend_.FinishLayer(layer, attended_.data(), n, hidden);
}

absl::Status Transformer::ProjectLayer(Layer layer, int64_t n, Position first_position,
                                       const float* hidden, Attention& attention) {
  if (n == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(const AttentionInput input, Project(layer, n, first_position, hidden));
  return attention.Collect(input);
}

}  // namespace carrel::model
