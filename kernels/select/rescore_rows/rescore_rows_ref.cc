#include <numeric>

#include "kernels/reference.h"
#include "kernels/select/rescore_rows/rescore_rows.h"

namespace carrel::kernels {

void RefRescoreRows(const RescoreRowsParams& p) {
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    const int32_t* candidates = p.candidates + head * p.candidate_stride;
    std::vector<double> best(static_cast<size_t>(p.count), -INFINITY);
    for (int64_t h = head * p.group; h < (head + 1) * p.group; ++h) {
      std::vector<double> scores;
      double largest = -INFINITY, sum = 0;
      for (int64_t i = 0; i < p.count; ++i) {
        const Bf16* key = p.kv.k + (head * p.kv.row_stride + candidates[i]) * p.head_dim;
        scores.push_back(p.scale * RefDot(p.q + h * p.head_dim, key, p.head_dim));
        largest = std::max(largest, scores.back());
      }
      for (const double score : scores) sum += std::exp(score - largest);
      if (p.base != nullptr) p.base[h] = static_cast<float>(largest + std::log(sum));
      for (size_t i = 0; i < scores.size(); ++i) {
        best[i] = std::max(best[i], scores[i] - largest - std::log(sum));
      }
    }
    std::vector<int64_t> order(best.size());
    std::iota(order.begin(), order.end(), int64_t{0});
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return best[static_cast<size_t>(a)] > best[static_cast<size_t>(b)];
    });
    for (int64_t i = 0; i < std::min(p.count, p.wanted); ++i) {
      p.ids[head * p.wanted + i] = candidates[order[static_cast<size_t>(i)]];
    }
  }
}

}  // namespace carrel::kernels
