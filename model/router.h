// What:   which experts a token goes to, and with what weight (mixture of experts).
// Math:   p = softmax(logits) over all experts; the k largest, of equal ones those with lower
//         numbers; their p, divided by their sum if `normalize`.
// Source: transformers, Qwen3MoeTopKRouter.
// Shapes: logits [experts] f32; chosen [k], by rising expert. 1 <= k <= experts.
// Edge:   a NaN is chosen last.   Threads: reentrant.   Cost: O(k experts).
#pragma once

#include <cstdint>

namespace carrel::model {

struct Choice {
  int32_t expert = 0;
  float weight = 0;
};

void ChooseExperts(const float* logits, int64_t experts, int64_t k, bool normalize, Choice* chosen);

}  // namespace carrel::model
