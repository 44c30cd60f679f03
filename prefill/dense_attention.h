// What:   attention of prefill over every earlier token: causal and dense.
// Threads: the work is spread in units of (q head, kernels::kPrefillQueryTile tokens): bits do not
//         depend on the pool.
// Cost:   with AMX, as much memory again as the layer's rows take: they are packed for it.
#pragma once

#include <vector>

#include "prefill/layer_attention.h"

namespace carrel::prefill {

class DenseAttention final : public LayerAttention {
 public:
  using LayerAttention::LayerAttention;

 private:
  void AttendBlock(const model::AttentionInput& input, float* attended) override;
  void PackRows(Position begin, Position end);

  std::vector<std::vector<float>> packed_;  // [kv_heads]; empty: rows are read as they are
};

}  // namespace carrel::prefill
