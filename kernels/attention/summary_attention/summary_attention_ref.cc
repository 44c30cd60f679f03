#include <algorithm>
#include <cmath>
#include <vector>

#include "common/dtype.h"
#include "kernels/attention/summary_attention/summary_attention.h"

namespace carrel::kernels {

void RefScoreSummaries(const SummaryScoreParams& p) {
  const auto* keys = static_cast<const int8_t*>(p.keys);
  for (int64_t h = 0; h < p.group; ++h) {
    const float* q = p.q + h * p.head_dim;
    double norm = 0;
    for (int64_t i = 0; i < p.head_dim; ++i) norm += double{q[i]} * q[i];
    for (int64_t c = 0; c < p.clusters; ++c) {
      double dot = 0, sum = 0, squares = 0;
      for (int64_t i = 0; i < p.head_dim; ++i) dot += double{q[i]} * keys[c * p.head_dim + i];
      double mean = p.scale * p.key_scale[c] * dot;
      double variance = double{p.share} * p.spread[c] * p.scale * p.scale * norm;
      int64_t gone = 0;
      for (int64_t j = 0; j < p.rows; ++j) {
        if (p.row_cluster[j] != c) continue;
        const double away = p.row_scores[h * p.row_score_stride + j] - double{p.base[h]} - mean;
        sum += away;
        squares += away * away;
        ++gone;
      }
      if (gone > 0 && p.left[c] > 0) {
        const double shift = std::min(-sum / p.left[c], 0.0);
        mean += shift;
        variance = std::clamp((p.counts[c] * variance - squares) / p.left[c] - shift * shift, 0.0,
                              variance);
      }
      p.scores[h * p.clusters + c] = static_cast<float>(mean + variance / 2);
    }
  }
}

void RefAttendSummaries(const SummaryAttentionParams& p) {
  const auto* values = static_cast<const int8_t*>(p.values);
  const int64_t dim = p.head_dim;
  for (int64_t h = 0; h < p.group; ++h) {
    const float* scores = p.scores + h * p.clusters;
    const auto score = [&](int64_t c) {
      return p.bound == nullptr ? scores[c] : std::min(scores[c], p.bound[h]);
    };
    double shift = -INFINITY, total = 0;
    for (int64_t c = 0; c < p.clusters; ++c) {
      if (p.rests[c] > 0) shift = std::max(shift, double{score(c)});
    }
    if (shift == -INFINITY) shift = 0;
    std::vector<double> e(static_cast<size_t>(p.clusters)), sum(static_cast<size_t>(dim));
    for (int64_t c = 0; c < p.clusters; ++c) {
      if (p.rests[c] > 0) e[c] = std::exp(score(c) - shift);
      total += e[c] * p.rests[c];
      for (int64_t i = 0; i < dim; ++i) {
        sum[i] += e[c] * p.counts[c] * p.value_scale[c] * values[c * dim + i];
      }
    }
    std::vector<float> row(static_cast<size_t>(dim));
    for (int64_t j = 0; j < p.rows; ++j) {
      WidenToFloat(DType::kBf16, p.v[j], dim, row.data());
      for (int64_t i = 0; i < dim; ++i) {
        sum[i] += p.row_weight * e[p.row_cluster[j]] * row[i];
      }
    }
    p.lse[h] = static_cast<float>(shift + std::log(total));
    for (int64_t i = 0; i < dim; ++i) {
      p.out[h * dim + i] = total == 0 ? 0.0f : static_cast<float>(sum[i] / total);
    }
  }
}

}  // namespace carrel::kernels
