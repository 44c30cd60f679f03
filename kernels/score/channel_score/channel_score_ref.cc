#include <algorithm>
#include <cmath>
#include <vector>

#include "common/bf16.h"
#include "kernels/score/channel_score/channel_score.h"

namespace carrel::kernels {
void RefChannelScore(const ChannelScoreParams& p) {
  std::vector<double> s(static_cast<size_t>(p.rows));
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    const uint32_t* labels = p.labels + head * p.label_stride / 8 * p.width;
    float* scores = p.scores + head * p.score_stride;
    std::fill_n(scores, p.rows, -INFINITY);
    for (int64_t h = head * p.group; h < (head + 1) * p.group; ++h) {
      double largest = -INFINITY, sum_of_exp = 0;
      for (int64_t j = 0; j < p.rows; ++j) {
        double sum = 0;
        for (int64_t c = 0; c < p.width; ++c) {
          const ChannelLabelPlace at = PlaceOfChannelLabel(j, p.width, c);
          const uint32_t level = labels[at.word] >> at.shift & 15;
          const int64_t i = head * p.width + c;
          sum += double{Bf16ToFloat(p.q[h * p.head_dim + p.channels[i]])} *
                 (double{p.least[i]} + double{p.step[i]} * level);
        }
        s[static_cast<size_t>(j)] = p.scale * sum;
        largest = std::max(largest, p.scale * sum);
      }
      for (const double x : s) sum_of_exp += std::exp(x - largest);
      const double base = largest + std::log(sum_of_exp);
      for (int64_t j = 0; j < p.rows; ++j) {
        scores[j] = std::max(scores[j], static_cast<float>(s[static_cast<size_t>(j)] - base));
      }
    }
  }
}

}  // namespace carrel::kernels
