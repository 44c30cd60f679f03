#include "prefill/head_statistics.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/dot_score/dot_score.h"

namespace carrel::prefill {
namespace {

// Adds the statistics of one distribution, given as scores; destroys them.
void AddSample(float* scores, int64_t keys, HeadStatistics& statistics) {
  const float max = *std::max_element(scores, scores + keys);
  double sum = 0, weighted = 0;  // of exp(s - max) and of (s - max) exp(s - max)
  for (int64_t j = 0; j < keys; ++j) {
    const double s = double{scores[j]} - max;
    const double e = std::exp(s);
    sum += e;
    weighted += s * e;
    scores[j] = static_cast<float>(e);
  }
  statistics.entropy_nats += std::log(sum) - weighted / sum;

  // The heaviest keys first, sorted in growing prefixes: usually few carry 75%.
  double carried = 0;
  int64_t count = 0, sorted = 0;
  while (carried < 0.75 * sum && count < keys) {
    if (count == sorted) {
      const int64_t next = std::min(keys, std::max<int64_t>(64, 4 * sorted));
      std::partial_sort(scores + sorted, scores + next, scores + keys, std::greater<float>());
      sorted = next;
    }
    carried += scores[count++];
  }
  statistics.keys_for_75_mass += static_cast<double>(count);
}

}  // namespace

std::vector<HeadStatistics> ComputeHeadStatistics(const LayerRows& rows, const AttentionShape& shape, int64_t max_samples, ThreadPool* pool) {
  const int64_t d = shape.head_dim;
  const int64_t samples = static_cast<int64_t>(rows.sample_positions.size());
  const int64_t used = std::min(samples, max_samples);
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  std::vector<HeadStatistics> all(shape.q_heads);
  const auto add_head = [&](int64_t head) {
    std::vector<float> scores;
    for (int64_t i = 0; i < used; ++i) {
      const int64_t sample = (2 * i + 1) * samples / (2 * used);
      const int64_t keys = rows.sample_positions[sample] + 1;
      scores.resize(static_cast<size_t>(keys) * shape.group());
      kernels::DotScore(&rows.queries[head][sample * shape.group() * d], shape.group(), d, rows.k[head].data(), keys, scale,
                        scores.data(), keys);
      for (int32_t h = 0; h < shape.group(); ++h) {
        AddSample(scores.data() + h * keys, keys, all[head * shape.group() + h]);
      }
    }
  };
  if (pool != nullptr) {
    pool->ParallelFor(shape.kv_heads, add_head);
  } else {
    for (int32_t head = 0; head < shape.kv_heads; ++head) add_head(head);
  }
  for (int32_t h = 0; h < shape.q_heads; ++h) {
    all[h].q_head = QHead(h);
    all[h].samples = used;
    if (used > 0) {
      all[h].entropy_nats /= static_cast<double>(used);
      all[h].keys_for_75_mass /= static_cast<double>(used);
    }
  }
  return all;
}

}  // namespace carrel::prefill
