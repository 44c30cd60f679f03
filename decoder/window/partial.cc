#include "decoder/window/partial.h"

#include <cmath>

#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {

void AttendRows(const AttentionShape& shape, const float* q, RowAddresses k, RowAddresses v,
                float* state) {
  thread_local std::vector<float> scores;
  scores.resize(static_cast<size_t>(shape.group()) * k.size());
  auto params = kernels::OfHeads<kernels::SparseAttentionParams>(shape);
  params.q = q;
  params.k = k.data();
  params.v = v.data();
  params.rows = static_cast<int64_t>(k.size());
  params.scores = scores.data();
  params.out = state;
  params.lse = state + params.group * params.head_dim;
  kernels::SparseAttention(params);
}

void Partial::Reset(int64_t n, const AttentionShape& shape) {
  out.assign(static_cast<size_t>(n * shape.q_heads * shape.head_dim), 0.0f);
  lse.assign(static_cast<size_t>(n * shape.q_heads), -INFINITY);
}

void Partial::Merge(const AttentionShape& shape, int64_t token, KvHead head, const float* other_out,
                    const float* other_lse) {
  const int64_t at = token * shape.q_heads + head.value() * shape.group();
  kernels::MergeStates(&out[static_cast<size_t>(at * shape.head_dim)],
                       &lse[static_cast<size_t>(at)], other_out, other_lse, shape.group(),
                       shape.head_dim);
}

void Partial::Attend(const AttentionShape& shape, int64_t token, KvHead head, const float* q,
                     RowAddresses k, RowAddresses v) {
  thread_local std::vector<float> state;
  state.resize(static_cast<size_t>(shape.group() * (shape.head_dim + 1)));
  const int64_t q_head = token * shape.q_heads + head.value() * shape.group();
  AttendRows(shape, q + q_head * shape.head_dim, k, v, state.data());
  Merge(shape, token, head, state.data());
}

}  // namespace carrel::decoder
