#include "prefill/head_statistics.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/dot_score/dot_score.h"

namespace carrel::prefill {
namespace {

// Bins of weight, the heaviest first: weights of a bin are within a factor of exp(1 / kBinsPerNat).
constexpr int kBinsPerNat = 16;
constexpr int kBins = 64 * kBinsPerNat;

int BinOf(float below_max) {
  const float bin = -below_max * kBinsPerNat;
  return bin < kBins - 1 ? static_cast<int>(bin) : kBins - 1;  // also what is not a number
}

// How many of the heaviest weights carry 75% of `sum`: whole bins first, and of the bin where it
// is reached, which alone is sorted, as many as are needed.
int64_t KeysFor75(const std::vector<float>& weights, const std::vector<uint16_t>& bins,
                  double sum) {
  double mass[kBins] = {};
  int64_t sizes[kBins] = {};
  for (size_t j = 0; j < weights.size(); ++j) {
    mass[bins[j]] += weights[j];
    ++sizes[bins[j]];
  }
  double carried = 0;
  int64_t count = 0;
  int bin = 0;
  for (; bin + 1 < kBins && carried + mass[bin] < 0.75 * sum; ++bin) {
    carried += mass[bin];
    count += sizes[bin];
  }
  std::vector<float> last;
  for (size_t j = 0; j < weights.size(); ++j) {
    if (bins[j] == bin) last.push_back(weights[j]);
  }
  std::sort(last.begin(), last.end(), std::greater<float>());
  for (size_t j = 0; j < last.size() && carried < 0.75 * sum; ++j) {
    carried += last[j];
    ++count;
  }
  return count;
}

struct Scratch {
  std::vector<float> weights;
  std::vector<uint16_t> bins;
};

// Adds the statistics of one distribution, given as scores.
void AddSample(const float* scores, int64_t keys, HeadStatistics& statistics, Scratch& scratch) {
  const float max = *std::max_element(scores, scores + keys);
  double sum = 0, weighted = 0;  // of exp(s - max) and of (s - max) exp(s - max)
  scratch.weights.resize(static_cast<size_t>(keys));
  scratch.bins.resize(static_cast<size_t>(keys));
  for (int64_t j = 0; j < keys; ++j) {
    const float s = scores[j] - max;
    const float e = std::exp(s);
    sum += e;
    weighted += double{s} * e;
    scratch.weights[static_cast<size_t>(j)] = e;
    scratch.bins[static_cast<size_t>(j)] = static_cast<uint16_t>(BinOf(s));
  }
  statistics.entropy_nats += std::log(sum) - weighted / sum;
  statistics.keys_for_75_mass += static_cast<double>(KeysFor75(scratch.weights, scratch.bins, sum));
}

}  // namespace

void DescribeHead(const LayerRows& rows, const AttentionShape& shape, KvHead head,
                  int64_t max_samples, HeadStatistics* statistics) {
  const int64_t d = shape.head_dim;
  const int64_t samples = static_cast<int64_t>(rows.sample_positions.size());
  const int64_t used = std::min(samples, max_samples);
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  std::vector<float> scores;
  Scratch scratch;
  for (int64_t i = 0; i < used; ++i) {
    const int64_t sample = (2 * i + 1) * samples / (2 * used);
    const int64_t keys = rows.sample_positions[sample] + 1;
    scores.resize(static_cast<size_t>(keys) * shape.group());
    kernels::DotScore(&rows.queries[head.value()][sample * shape.group() * d], shape.group(), d,
                      rows.k[head.value()].data(), keys, scale, scores.data(), keys);
    for (int32_t h = 0; h < shape.group(); ++h) {
      AddSample(scores.data() + h * keys, keys, statistics[h], scratch);
    }
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

std::vector<HeadStatistics> ComputeHeadStatistics(const LayerRows& rows,
                                                  const AttentionShape& shape, int64_t max_samples,
                                                  ThreadPool* pool) {
  std::vector<HeadStatistics> all(shape.q_heads);
  const auto describe = [&](int64_t head) {
    DescribeHead(rows, shape, KvHead(static_cast<int32_t>(head)), max_samples,
                 &all[head * shape.group()]);
  };
  if (pool != nullptr) {
    pool->ParallelFor(shape.kv_heads, describe);
  } else {
    for (int32_t head = 0; head < shape.kv_heads; ++head) describe(head);
  }
  return all;
}

}  // namespace carrel::prefill
