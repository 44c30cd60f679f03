// What:   attention of prefill over every earlier token: causal and dense; in layers with a sliding
//         window, over the newest tokens alone.
// Threads: the work is spread in units of (some q heads of a KV head, kernels::kPrefillQueryTile tokens):
//         bits do not depend on the pool.
// Cost:   with AMX, as much memory again as the layer's rows take: they are packed for it.
#pragma once

#include <utility>
#include <vector>

#include "prefill/layer_attention.h"

namespace carrel::prefill {

class DenseAttention final : public LayerAttention {
 public:
  // windows: of each layer, the newest tokens that count, the one that looks included, or 0 for all;
  // empty: all in every layer. The others as of LayerAttention.
  DenseAttention(const AttentionShape& shape, int64_t tokens,
                 std::vector<Position> sample_positions, std::vector<float> undo_rope,
                 ThreadPool* pool, std::vector<int64_t> windows = {}, int64_t probe = 0)
      : LayerAttention(shape, tokens, std::move(sample_positions), std::move(undo_rope), pool,
                       probe),
        windows_(std::move(windows)) {}

 private:
  void AttendBlock(const model::AttentionInput& input, float* attended) override;
  int64_t HeadsTogether(int64_t tiles) const;
  void PackRows(Position begin, Position end);
  void AttendWindow(const model::AttentionInput& input, int64_t window, float* attended);

  const std::vector<int64_t> windows_;
  std::vector<std::vector<float>> packed_;  // [kv_heads]; empty: rows are read as they are
};

}  // namespace carrel::prefill
