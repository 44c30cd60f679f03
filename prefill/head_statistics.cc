#include "prefill/head_statistics.h"

#include <algorithm>
#include <cmath>

#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/softmax_concentration/softmax_concentration.h"

namespace carrel::prefill {
namespace {

// Scores that are kept at a time: as many samples as have no more of them share the passes over
// the keys.
constexpr int64_t kScores = int64_t{1} << 20;

// Samples of one KV head, by position ascending.
struct Samples {
  std::vector<Position> positions;
  std::vector<float> queries;  // [samples, group, head_dim]
};

Samples TakeSamples(const LayerRows& rows, const AttentionShape& shape, KvHead head, int64_t used) {
  const auto samples = static_cast<int64_t>(rows.sample_positions.size());
  const int64_t width = int64_t{shape.group()} * shape.head_dim;
  Samples taken;
  for (int64_t i = 0; i < used; ++i) {
    const int64_t sample = (2 * i + 1) * samples / (2 * used);
    taken.positions.push_back(rows.sample_positions[sample]);
    const float* const queries = &rows.queries[head.value()][sample * width];
    taken.queries.insert(taken.queries.end(), queries, queries + width);
  }
  return taken;
}

}  // namespace

void DescribeHead(const LayerRows& rows, const AttentionShape& shape, KvHead head,
                  int64_t max_samples, HeadStatistics* statistics) {
  const int64_t d = shape.head_dim, group = shape.group();
  const int64_t used = std::min(static_cast<int64_t>(rows.sample_positions.size()), max_samples);
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  const Samples samples = TakeSamples(rows, shape, head, used);
  const uint16_t* const k = rows.k[head.value()].data();
  std::vector<float> scores, scratch;
  for (int64_t begin = 0; begin < used;) {
    int64_t end = begin + 1;
    const auto fits = [&](int64_t sample) {
      return (sample + 1 - begin) * group * (samples.positions[sample] + 1) <= kScores;
    };
    while (end < used && fits(end)) ++end;
    const int64_t stride = samples.positions[end - 1] + 1;
    scores.resize(static_cast<size_t>((end - begin) * group * stride));
    scratch.resize(static_cast<size_t>(stride));
    // A stretch of keys is scored with the samples that stand behind it.
    for (int64_t i = begin, key = 0; i < end; key = samples.positions[i++] + 1) {
      kernels::DotScore(samples.queries.data() + i * group * d, (end - i) * group, d, k + key * d,
                        samples.positions[i] + 1 - key, scale,
                        scores.data() + (i - begin) * group * stride + key, stride);
    }
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t h = 0; h < group; ++h) {
        const kernels::Concentration sample =
            kernels::SoftmaxConcentration(&scores[((i - begin) * group + h) * stride],
                                          samples.positions[i] + 1, 0.75, scratch.data());
        statistics[h].entropy_nats += sample.entropy_nats;
        statistics[h].keys_for_75_mass += static_cast<double>(sample.elements);
      }
    }
    begin = end;
  }
  for (int32_t h = 0; h < shape.group(); ++h) {
    statistics[h].q_head = QHead(head.value() * shape.group() + h);
    statistics[h].samples = used;
    if (used > 0) {
      statistics[h].entropy_nats /= static_cast<double>(used);
      statistics[h].keys_for_75_mass /= static_cast<double>(used);
    }
  }
}

}  // namespace carrel::prefill
