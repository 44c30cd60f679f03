#include "prefill/head_statistics.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/dot_score/dot_score.h"

namespace carrel::prefill {
namespace {

// Scores by their distance from the largest: the weight of a bin is known without sorting it.
constexpr float kBinsPerNat = 64;
constexpr int kBins = 2048;  // the last one holds all that weigh less than e^-32

int BinOf(float below_max) {
  return static_cast<int>(std::min(below_max * kBinsPerNat, static_cast<float>(kBins - 1)));
}

// Adds the statistics of one distribution, given as scores.
void AddSample(const float* scores, int64_t keys, HeadStatistics& statistics) {
  const float max = *std::max_element(scores, scores + keys);
  double sum = 0, weighted = 0;  // of exp(s - max) and of (s - max) exp(s - max)
  std::vector<double> mass(kBins);
  std::vector<int64_t> count(kBins);
  for (int64_t j = 0; j < keys; ++j) {
    const float below = max - scores[j];
    const double e = std::exp(-double{below});
    sum += e;
    weighted -= double{below} * e;
    mass[BinOf(below)] += e;
    ++count[BinOf(below)];
  }
  statistics.entropy_nats += std::log(sum) - weighted / sum;

  // Whole bins, the heaviest keys first; then the keys of the bin in which 75% is reached.
  double carried = 0;
  int64_t used = 0;
  int bin = 0;
  for (; bin < kBins && carried + mass[bin] < 0.75 * sum; ++bin) {
    carried += mass[bin];
    used += count[bin];
  }
  std::vector<float> last;
  for (int64_t j = 0; j < keys; ++j) {
    if (BinOf(max - scores[j]) == bin) last.push_back(scores[j]);
  }
  std::sort(last.begin(), last.end(), std::greater<float>());
  for (size_t i = 0; i < last.size() && carried < 0.75 * sum; ++i, ++used) {
    carried += std::exp(double{last[i]} - max);
  }
  statistics.keys_for_75_mass += static_cast<double>(used);
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
