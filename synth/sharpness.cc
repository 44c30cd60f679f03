#include "synth/sharpness.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "common/dtype.h"
#include "synth/linear_algebra.h"
#include "synth/random.h"

namespace carrel::synth {

RowRange ZoneBefore(Position position) {
  const Position end = std::max<Position>(kSink, position - kLocal);
  return {std::max(kSink, end - kMaxZone), end};
}

double EntropyOf(const std::vector<float>& scores, double times) {
  if (scores.empty()) return 0;
  const double max = times * *std::max_element(scores.begin(), scores.end());
  double sum = 0, weighted = 0;
  for (const float score : scores) {
    const double s = times * score - max;
    const double e = std::exp(s);
    sum += e;
    weighted += s * e;
  }
  return std::log(sum) - weighted / sum;
}

Sharpness SharpnessOf(const std::vector<float>& scores, double times) {
  Sharpness out;
  if (scores.empty()) return out;
  const auto best = std::max_element(scores.begin(), scores.end());
  out.best = best - scores.begin();
  double sum = 0, squares = 0, total = 0;
  std::vector<float> weights(scores.size());
  for (size_t j = 0; j < scores.size(); ++j) {
    const double s = scores[j];
    sum += s;
    squares += s * s;
    const double e = std::exp(times * (s - *best));
    weights[j] = static_cast<float>(e);
    total += e;
  }
  const double n = static_cast<double>(scores.size()), mean = sum / n;
  const double variance = squares / n - mean * mean;
  out.peak = variance > 0 ? (*best - mean) / std::sqrt(variance) : 0;
  out.entropy = EntropyOf(scores, times);
  // The heaviest first, sorted in growing prefixes: usually few carry 75%.
  double carried = 0;
  size_t count = 0, sorted = 0;
  while (carried < 0.75 * total && count < weights.size()) {
    if (count == sorted) {
      const size_t next = std::min(weights.size(), std::max<size_t>(64, 4 * sorted));
      std::partial_sort(weights.begin() + static_cast<int64_t>(sorted),
                        weights.begin() + static_cast<int64_t>(next), weights.end(),
                        std::greater<>());
      sorted = next;
    }
    carried += weights[count++];
  }
  out.keys_for_75_mass = static_cast<double>(count);
  return out;
}

CARREL_SYNTH_WIDE
void ScoreRows(const float* q, const uint16_t* rows, int64_t n, int64_t d, float scale,
               float* scores) {
  constexpr int64_t kLanes = 16;
  for (int64_t j = 0; j < n; ++j) {
    const uint16_t* row = rows + j * d;
    float lanes[kLanes] = {};
    int64_t c = 0;
    for (; c + kLanes <= d; c += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) lanes[l] += q[c + l] * Bf16ToFloat(row[c + l]);
    }
    float sum = 0;
    for (; c < d; ++c) sum += q[c] * Bf16ToFloat(row[c]);
    for (int64_t l = 0; l < kLanes; ++l) sum += lanes[l];
    scores[j] = scale * sum;
  }
}

double QueryKeyGap(const std::vector<float>& keys, const std::vector<float>& queries, int64_t d) {
  const int64_t n = static_cast<int64_t>(keys.size()) / d;
  const int64_t m = static_cast<int64_t>(queries.size()) / d;
  if (n < 4 || m < 1) return 0;
  std::vector<float> half;
  for (int64_t i = 0; i < n; i += 2) {
    half.insert(half.end(), keys.begin() + i * d, keys.begin() + (i + 1) * d);
  }
  const Mahalanobis distances(half, d);
  double of_keys = 0, of_queries = 0;
  for (int64_t i = 1; i < n; i += 2) of_keys += distances.Distance(&keys[i * d]);
  for (int64_t i = 0; i < m; ++i) of_queries += distances.Distance(&queries[i * d]);
  of_keys /= static_cast<double>(n / 2);
  of_queries /= static_cast<double>(m);
  return of_keys > 0 ? of_queries / of_keys : 0;
}

}  // namespace carrel::synth
