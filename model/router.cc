#include "model/router.h"

#include <algorithm>
#include <cmath>

namespace carrel::model {

void ChooseExperts(const float* logits, int64_t experts, int64_t k, bool normalize,
                   Choice* chosen) {
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < experts; ++e) {
      const bool taken =
          std::any_of(chosen, chosen + i, [&](const Choice& c) { return c.expert == e; });
      if (!taken && (best < 0 || logits[e] > logits[best] ||
                     (std::isnan(logits[best]) && !std::isnan(logits[e])))) {
        best = e;
      }
    }
    chosen[i].expert = static_cast<int32_t>(best);
  }
  const float top = logits[chosen[0].expert];
  float all = 0, of_chosen = 0;
  for (int64_t e = 0; e < experts; ++e) all += std::exp(logits[e] - top);
  for (int64_t i = 0; i < k; ++i) {
    chosen[i].weight = std::exp(logits[chosen[i].expert] - top) / all;
    of_chosen += chosen[i].weight;
  }
  for (int64_t i = 0; normalize && i < k; ++i) chosen[i].weight /= of_chosen;
  std::sort(chosen, chosen + k,
            [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
}

}  // namespace carrel::model
