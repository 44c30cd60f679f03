// What:   what every attention of prefill on the CPU does beside attending: collects a layer's rows
//         and sampled queries, and hands them out as they are stored. Plugged into
//         model::Transformer.
// Shapes: rows of the layer are kept as [kv_heads][tokens, head_dim] f32: attention is computed on
//         what the model computed, before K and V are rounded to bf16.
// Ownership: the pool outlives it.
// Threads: one caller; the work is spread over the pool.
// Edge:   tokens of a probe stand behind the document and come in blocks of their own, so that the
//         document's are computed as they would be without. They see it and one another as if they
//         were its last tokens.
// Cost:   8 bytes * tokens * kv_heads * head_dim of memory for the one layer.
#pragma once

#include <vector>

#include "common/thread_pool.h"
#include "model/transformer.h"
#include "prefill/layer_rows.h"

namespace carrel::prefill {

class LayerAttention : public model::Attention {
 public:
  // undo_rope: inverse frequencies of the RoPE that is taken off keys and sampled queries before
  // they are handed out; empty: they are handed out as they came.
  // probe: tokens behind the document; 0 where keys are handed out before RoPE.
  LayerAttention(const AttentionShape& shape, int64_t tokens,
                 std::vector<Position> sample_positions, std::vector<float> undo_rope,
                 ThreadPool* pool, int64_t probe = 0);

  // Blocks come in order, without gaps, from position 0.
  absl::Status Attend(const model::AttentionInput& input, float* attended) final;
  absl::Status Collect(const model::AttentionInput& input) final;

  // The layer is complete: hands out its rows, rounded to bf16, and starts the next one.
  LayerRows TakeLayer(Layer layer);

 protected:
  // The block's own rows are collected already.
  virtual void AttendBlock(const model::AttentionInput& input, float* attended) = 0;

  // Rows of a KV head from position 0 on.
  const float* k(int64_t kv_head) const { return k_[static_cast<size_t>(kv_head)].data(); }
  const float* v(int64_t kv_head) const { return v_[static_cast<size_t>(kv_head)].data(); }

  int64_t all_tokens() const { return tokens_ + probe_; }

  const AttentionShape shape_;
  ThreadPool* const pool_;

 private:
  void CollectRows(const model::AttentionInput& input);
  // Token i's of the input.
  void CollectQueries(const model::AttentionInput& input, int64_t i,
                      std::vector<std::vector<float>>& queries) const;
  void UndoRope();
  void TakeProbe(ProbeRows& probe);

  const int64_t tokens_, probe_;
  const std::vector<Position> sample_positions_;
  std::vector<float> turn_back_;  // undo_rope with its sign changed
  Position filled_ = 0;
  size_t next_sample_ = 0;
  std::vector<std::vector<float>> k_, v_;          // [kv_heads] of [tokens and probe, head_dim]
  std::vector<std::vector<float>> queries_;        // [kv_heads] of [samples, group, head_dim]
  std::vector<std::vector<float>> probe_queries_;  // [kv_heads] of [probe, group, head_dim]
};

}  // namespace carrel::prefill
