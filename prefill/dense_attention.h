// What:   attention of prefill over every earlier token: causal and dense.
// Threads: the work is spread in units of (q head, kernels::kPrefillQueryTile tokens): bits do not
//         depend on the pool.
#pragma once

#include "prefill/layer_attention.h"

namespace carrel::prefill {

class DenseAttention final : public LayerAttention {
 public:
  using LayerAttention::LayerAttention;

 private:
  void AttendBlock(const model::AttentionInput& input, float* attended) override;
};

}  // namespace carrel::prefill
