#include "model/transformer.h"

#include "common/status.h"

namespace carrel::model {
namespace {

// Grows only: block after block of the same size allocates once.
void Reserve(std::vector<float>& buffer, int64_t floats) {
  if (static_cast<int64_t>(buffer.size()) < floats) buffer.resize(static_cast<size_t>(floats));
}

}  // namespace

absl::Status Transformer::ForwardLayer(Layer layer, int64_t n, Position first_position,
                                       float* hidden, Attention& attention) {
  CARREL_CHECK(n >= 0 && first_position >= 0);
  if (n == 0) return absl::OkStatus();
  const AttentionShape& shape = config().shape;
  const int64_t q_floats = n * shape.q_heads * shape.head_dim;
  const int64_t kv_floats = n * shape.kv_heads * shape.head_dim;
  Reserve(q_, q_floats);
  Reserve(k_, kv_floats);
  Reserve(v_, kv_floats);
  Reserve(attended_, q_floats);

  RETURN_IF_ERROR(
      backend_.ProjectQkv(layer, hidden, n, first_position, q_.data(), k_.data(), v_.data()));
  AttentionInput input;
  input.layer = layer;
  input.first_position = first_position;
  input.n = n;
  input.q = q_.data();
  input.k = k_.data();
  input.v = v_.data();
  RETURN_IF_ERROR(attention.Attend(input, attended_.data()));
  return backend_.FinishLayer(layer, attended_.data(), n, hidden);
}

}  // namespace carrel::model
