// What:   how much any of a block of queries wants each of some keys: max-pooling over a block's
//         tokens and q heads, under hierarchical pruning in prefill.
// Math:   out[j] = max_i <q[i], k[j]>, unscaled.
// Shapes: q [queries, head_dim] f32 contiguous, packed once; k [keys, head_dim] f32 contiguous; out
//         [keys] f32.
// Edge:   queries == 0 gives -inf.
// Ownership: a packed block points into its own buffer.
// Threads: reentrant; a packed block may be shared.
// Cost:   2 * queries * keys * head_dim flops, queries rounded up to two vectors' width.
#pragma once

#include <cstdint>
#include <vector>

namespace carrel::kernels {

// Queries side by side in the lanes; what lies beyond the last repeats it.
class QueryPanels {
 public:
  QueryPanels(const float* q, int64_t queries, int64_t head_dim);

  int64_t queries() const { return queries_; }
  int64_t head_dim() const { return head_dim_; }
  const float* data() const { return data_; }  // [panels, head_dim, width], aligned to 64 bytes
  QueryPanels(const QueryPanels&) = delete;
  QueryPanels& operator=(const QueryPanels&) = delete;

 private:
  const int64_t queries_, head_dim_;
  std::vector<float> storage_;
  float* data_ = nullptr;
};

void MaxScore(const QueryPanels& queries, const float* k, int64_t keys, float* out);
void RefMaxScore(const float* q, int64_t queries, int64_t head_dim, const float* k, int64_t keys,
                 float* out);

}  // namespace carrel::kernels
