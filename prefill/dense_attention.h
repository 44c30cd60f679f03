// What:   the attention of prefill: causal and dense over one layer's rows, which it collects.
// Plugged into model::Transformer. Shapes: rows of the layer are kept as [kv_heads][tokens,
// head_dim] f32: attention is computed on what the model computed, before K and V are rounded to
// bf16. Threads: one caller; the work is spread over the pool in units of (q head,
// kernels::kPrefillQueryTile tokens): bits do not depend on the pool. Cost:   8 bytes * tokens *
// kv_heads * head_dim of memory for the one layer.
#pragma once

#include <vector>

#include "common/thread_pool.h"
#include "model/transformer.h"
#include "prefill/layer_rows.h"

namespace carrel::prefill {

class DenseAttention : public model::Attention {
 public:
  DenseAttention(const AttentionShape& shape, int64_t tokens,
                 std::vector<Position> sample_positions, ThreadPool* pool);

  // Blocks come in order, without gaps, from position 0.
  absl::Status Attend(const model::AttentionInput& input, float* attended) override;

  // The layer is complete: hands out its rows, rounded to bf16, and starts the next one.
  LayerRows TakeLayer(Layer layer);

 private:
  void CollectRows(const model::AttentionInput& input);
  void CollectSamples(const model::AttentionInput& input);

  const AttentionShape shape_;
  const int64_t tokens_;
  const std::vector<Position> sample_positions_;
  ThreadPool* const pool_;
  const float scale_;
  Position filled_ = 0;
  size_t next_sample_ = 0;
  std::vector<std::vector<float>> k_, v_;    // [kv_heads] of [tokens, head_dim]
  std::vector<std::vector<float>> queries_;  // [kv_heads] of [samples, group, head_dim]
};

}  // namespace carrel::prefill
