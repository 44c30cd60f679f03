#include "synth/head_generator.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "common/dtype.h"
#include "synth/random.h"
#include "synth/sharpness.h"

namespace carrel::synth {
namespace {

// Streams of random numbers of a head.
enum Stream : uint64_t { kTopic = 1, kKey, kValue, kQuery, kTarget, kPeak, kZone, kCentre };

constexpr int64_t kZoneSampleRows = 256;
constexpr double kMoreThanChance = 0.3;  // deviations by which a peak is no accident
constexpr double kHighestShare = 0.9;    // of the peak that a key can be given at all
constexpr float kTopicShift = 0.3f;      // of the noise, by which a mixed topic is moved

// out = centre + noise. scratch: rank + dim floats.
CARREL_SYNTH_WIDE
void DrawAbout(const float* centre, const Factor& noise, uint64_t seed, float amount,
               float* scratch, float* out) {
  const int64_t d = noise.dim;
  FillNormal(seed, scratch, noise.rank + d);
  const float* own = scratch + noise.rank;
  const float* rest = noise.rest.data();
  for (int64_t c = 0; c < d; ++c) out[c] = centre[c] + amount * own[c] * rest[c];
  for (int64_t i = 0; i < noise.rank; ++i) {
    const float z = amount * scratch[i];
    const float* direction = noise.directions.data() + i * d;
    for (int64_t c = 0; c < d; ++c) out[c] += z * direction[c];
  }
}

// Finite values only.
inline uint16_t Round(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

CARREL_SYNTH_WIDE
void TurnAndRound(const float* x, const float* cos, const float* sin, int64_t d, uint16_t* out) {
  const int64_t half = d / 2;
  for (int64_t c = 0; c < half; ++c) {
    const float a = x[c], b = x[c + half];
    out[c] = Round(a * cos[c] - b * sin[c]);
    out[c + half] = Round(b * cos[c] + a * sin[c]);
  }
}

CARREL_SYNTH_WIDE
void RoundAll(const float* x, int64_t d, uint16_t* out) {
  for (int64_t c = 0; c < d; ++c) out[c] = Round(x[c]);
}

double Dot(const float* a, const float* b, int64_t d) {
  double sum = 0;
  for (int64_t c = 0; c < d; ++c) sum += double{a[c]} * b[c];
  return sum;
}

}  // namespace

struct HeadGenerator::ZoneSample {
  RowRange zone;
  int64_t rows = 0;
  std::vector<float> keys;  // [rows, d]
  std::vector<float> mean, inverse_variance;
};

HeadGenerator::HeadGenerator(const HeadModel& model, int64_t head_dim, int64_t tokens,
                             uint64_t seed)
    : model_(model), d_(head_dim), tokens_(tokens), seed_(seed), channel_(d_), copy_(d_) {
  const int64_t half = d_ / 2, of_source = model.head_dim / 2;
  for (int64_t pair = 0, first = 0; pair < half; ++pair) {
    const int64_t from = pair * of_source / half;
    if (pair > 0 && from != channel_[pair - 1]) first = pair;
    channel_[pair] = from;
    channel_[pair + half] = from + of_source;
    copy_[pair] = copy_[pair + half] = pair - first;
    copies_ = std::max(copies_, pair - first + 1);
  }
  key_noise_ = Stretch(model.key_noise);
  value_noise_ = Stretch(model.value_noise);
  MakeTopics();
  const int64_t sinks = static_cast<int64_t>(model.key_sinks.size()) / model.head_dim;
  for (int64_t i = 0; i < sinks; ++i) {
    for (int64_t c = 0; c < d_; ++c) {
      key_sinks_.push_back(model.key_sinks[i * model.head_dim + channel_[c]]);
      value_sinks_.push_back(model.value_sinks[i * model.head_dim + channel_[c]]);
    }
  }
  for (const QueryModel& query : model.queries) {
    query_spread_.push_back(Stretch(query.spread));
    query_mean_.emplace_back(d_);
    Stretch(query.mean, query_mean_.back().data());
    query_times_.push_back(1);
  }
}

void HeadGenerator::Stretch(const std::vector<float>& from, float* to) const {
  for (int64_t c = 0; c < d_; ++c) to[c] = from[channel_[c]];
}

Factor HeadGenerator::Stretch(const Factor& from) const {
  Factor to;
  to.dim = d_;
  to.rank = from.rank * copies_;
  to.directions.resize(to.rank * d_);
  to.rest.resize(d_);
  Stretch(from.rest, to.rest.data());
  for (int64_t i = 0; i < from.rank; ++i) {
    for (int64_t c = 0; c < d_; ++c) {
      to.directions[(i * copies_ + copy_[c]) * d_ + c] =
          from.directions[i * from.dim + channel_[c]];
    }
  }
  return to;
}

void HeadGenerator::MakeTopics() {
  const int64_t known = model_.topics();
  const double longer = static_cast<double>(tokens_) / static_cast<double>(model_.tokens);
  const int64_t topics = known * std::clamp<int64_t>(std::lround(std::sqrt(longer)), 1, 16);
  std::vector<double> up_to;
  for (int64_t t = 0; t < known; ++t) {
    up_to.push_back((t > 0 ? up_to.back() : 0) + model_.weights[t]);
  }
  const auto any = [&](uint64_t bits) {
    const double u = Uniform(bits) * up_to.back();
    return std::min<int64_t>(known - 1,
                             std::upper_bound(up_to.begin(), up_to.end(), u) - up_to.begin());
  };
  key_topics_.resize(topics * d_);
  value_topics_.resize(topics * d_);
  std::vector<float> scratch(key_noise_.rank + value_noise_.rank + d_);
  double sum = 0;
  for (int64_t t = 0; t < topics; ++t) {
    const uint64_t seed = Mix(seed_, kCentre, t);
    std::vector<int64_t> from(copies_, t);
    for (int64_t copy = 0; copy < copies_ && t >= known; ++copy) from[copy] = any(Mix(seed, copy));
    float* key = &key_topics_[t * d_];
    float* value = &value_topics_[t * d_];
    for (int64_t c = 0; c < d_; ++c) {
      const int64_t at = from[copy_[c]] * model_.head_dim + channel_[c];
      key[c] = model_.key_topics[at];
      value[c] = model_.value_topics[at];
    }
    if (t >= known) {
      DrawAbout(key, key_noise_, Mix(seed, 1000), kTopicShift, scratch.data(), key);
      DrawAbout(value, value_noise_, Mix(seed, 1001), kTopicShift, scratch.data(), value);
    }
    sum += model_.weights[from[0]] * (0.5 + Uniform(Mix(seed, 1002)));
    up_to_.push_back(sum);
  }
}

void HeadGenerator::DrawRows(Position first, int64_t n, const float* cos, const float* sin,
                             uint16_t* k, uint16_t* v) const {
  std::vector<float> scratch(std::max(key_noise_.rank, value_noise_.rank) + d_), row(d_);
  const int64_t sinks = static_cast<int64_t>(key_sinks_.size()) / d_;
  int64_t topic = -1;
  for (int64_t i = 0; i < n; ++i) {
    const Position at = first + i;
    const uint64_t chance = Mix(seed_, kTopic, at);
    if (topic < 0 || Uniform(Mix(chance)) >= model_.stay) {
      const double u = Uniform(chance) * up_to_.back();
      topic = std::min<int64_t>(static_cast<int64_t>(up_to_.size()) - 1,
                                std::upper_bound(up_to_.begin(), up_to_.end(), u) - up_to_.begin());
    }
    if (at < sinks) {
      std::copy_n(&key_sinks_[at * d_], d_, row.data());
    } else {
      DrawAbout(&key_topics_[topic * d_], key_noise_, Mix(seed_, kKey, at), 1, scratch.data(),
                row.data());
    }
    TurnAndRound(row.data(), cos + i * (d_ / 2), sin + i * (d_ / 2), d_, k + i * d_);
    if (at < sinks) {
      std::copy_n(&value_sinks_[at * d_], d_, row.data());
    } else {
      DrawAbout(&value_topics_[topic * d_], value_noise_, Mix(seed_, kValue, at), 1, scratch.data(),
                row.data());
    }
    RoundAll(row.data(), d_, v + i * d_);
  }
}

HeadGenerator::ZoneSample HeadGenerator::SampleZone(const uint16_t* k, RowRange zone,
                                                    uint64_t seed) const {
  ZoneSample sample;
  sample.zone = zone;
  sample.rows = std::min(kZoneSampleRows, zone.rows());
  sample.keys.resize(sample.rows * d_);
  for (int64_t i = 0; i < sample.rows; ++i) {
    const Position at = zone.begin + Below(Mix(seed, i), zone.rows());
    for (int64_t c = 0; c < d_; ++c) sample.keys[i * d_ + c] = Bf16ToFloat(k[at * d_ + c]);
  }
  sample.mean = MeanOf(sample.keys, d_);
  std::vector<double> squares(d_);
  for (int64_t i = 0; i < sample.rows; ++i) {
    for (int64_t c = 0; c < d_; ++c) {
      const double x = sample.keys[i * d_ + c] - sample.mean[c];
      squares[c] += x * x;
    }
  }
  double all = 0;
  for (const double x : squares) all += x;
  const double least = 1e-3 * all / static_cast<double>(d_) + 1e-30;
  sample.inverse_variance.resize(d_);
  for (int64_t c = 0; c < d_; ++c) {
    sample.inverse_variance[c] =
        static_cast<float>(static_cast<double>(sample.rows) / std::max(squares[c], least));
  }
  return sample;
}

// Moves q until the key stands out of the sample by `peak` deviations.
void HeadGenerator::Point(const ZoneSample& sample, const uint16_t* key, double peak,
                          float* q) const {
  std::vector<float> target(d_), along(d_);
  for (int64_t c = 0; c < d_; ++c) {
    target[c] = Bf16ToFloat(key[c]);
    along[c] = (target[c] - sample.mean[c]) * sample.inverse_variance[c];
  }
  double mean_q = 0, mean_a = 0, qq = 0, aa = 0, qa = 0;
  for (int64_t i = 0; i < sample.rows; ++i) {
    const double x = Dot(q, &sample.keys[i * d_], d_),
                 y = Dot(along.data(), &sample.keys[i * d_], d_);
    mean_q += x, mean_a += y;
    qq += x * x, aa += y * y, qa += x * y;
  }
  const double n = static_cast<double>(sample.rows);
  mean_q /= n, mean_a /= n;
  qq = qq / n - mean_q * mean_q, aa = aa / n - mean_a * mean_a, qa = qa / n - mean_q * mean_a;
  if (!(qq > 0) || !(aa > 0)) return;
  const double ahead_q = Dot(q, target.data(), d_) - mean_q;
  const double ahead_a = Dot(along.data(), target.data(), d_) - mean_a;
  const double wanted = std::min(peak, kHighestShare * ahead_a / std::sqrt(aa));
  const auto stands_out = [&](double times) {
    return (ahead_q + times * ahead_a) /
           std::sqrt(std::max(qq + 2 * times * qa + times * times * aa, 1e-30));
  };
  double low = 0, high = std::sqrt(qq / aa);
  for (int i = 0; i < 12 && stands_out(high) < wanted; ++i) high *= 2;
  for (int i = 0; i < 30; ++i) {
    const double middle = (low + high) / 2;
    (stands_out(middle) < wanted ? low : high) = middle;
  }
  for (int64_t c = 0; c < d_; ++c) q[c] += static_cast<float>(high) * along[c];
}

std::vector<float> HeadGenerator::Draw(const uint16_t* k, const Rotary& rotary, Position position,
                                       RowRange zone, uint64_t salt) const {
  const auto group = static_cast<int64_t>(query_mean_.size());
  std::vector<float> queries(group * d_), scratch(d_ + kNoiseRank * copies_);
  ZoneSample sample;
  if (zone.rows() >= kLeastZone) sample = SampleZone(k, zone, Mix(seed_, kZone, position));
  Position first_target = -1;
  for (int64_t h = 0; h < group; ++h) {
    const uint64_t seed = Mix(Mix(seed_, kQuery, salt), position * 4096 + h);
    float* q = &queries[h * d_];
    DrawAbout(query_mean_[h].data(), query_spread_[h], seed, 1, scratch.data(), q);
    rotary.Turn(position, q);
    const std::vector<float>& peaks = model_.queries[h].peaks;
    if (sample.rows == 0 || peaks.empty()) continue;
    const double peak = peaks[Below(Mix(seed, kPeak), static_cast<int64_t>(peaks.size()))];
    const double by_chance = std::sqrt(2 * std::log(static_cast<double>(zone.rows())));
    if (peak < by_chance + kMoreThanChance) continue;
    const bool shared = first_target >= 0 && Uniform(Mix(seed, kTarget, 1)) < model_.shared_best;
    const Position target =
        shared ? first_target : zone.begin + Below(Mix(seed, kTarget), zone.rows());
    if (first_target < 0) first_target = target;
    Point(sample, k + target * d_, peak, q);
  }
  return queries;
}

std::vector<float> HeadGenerator::DrawQueries(const uint16_t* k, const Rotary& rotary,
                                              Position position, uint64_t salt) const {
  std::vector<float> queries =
      Draw(k, rotary, position, {kSink, std::max<Position>(kSink, position - kLocal)}, salt);
  for (size_t h = 0; h < query_times_.size(); ++h) {
    for (int64_t c = 0; c < d_; ++c) queries[h * d_ + c] *= static_cast<float>(query_times_[h]);
  }
  return queries;
}

HeadFit HeadGenerator::Calibrate(const uint16_t* k, const Rotary& rotary) {
  HeadFit fit;
  fit.topic_share = model_.fit.topic_share;
  const auto group = static_cast<int64_t>(query_mean_.size());
  const float scale = 1 / std::sqrt(static_cast<float>(d_));
  std::vector<std::vector<std::vector<float>>> scores(group);  // [group][measured][zone]
  std::vector<std::vector<float>> drawn;
  for (Position position : model_.measured) {
    if (tokens_ < model_.tokens) position = position * tokens_ / model_.tokens;
    const RowRange zone = ZoneBefore(position);
    if (zone.rows() < kLeastZone) continue;
    drawn.push_back(Draw(k, rotary, position, zone, ~uint64_t{0}));
    for (int64_t h = 0; h < group; ++h) {
      std::vector<float>& of_query = scores[h].emplace_back(zone.rows());
      ScoreRows(&drawn.back()[h * d_], k + zone.begin * d_, zone.rows(), d_, scale,
                of_query.data());
    }
  }
  if (drawn.empty()) return fit;
  const double share = 1 / static_cast<double>(group * static_cast<int64_t>(drawn.size()));
  std::vector<float> queries;
  for (int64_t h = 0; h < group; ++h) {
    double low = -8, high = 8;  // powers of two
    for (int i = 0; i < 10; ++i) {
      const double middle = (low + high) / 2;
      double entropy = 0;
      for (const auto& of_query : scores[h]) entropy += EntropyOf(of_query, std::exp2(middle));
      entropy /= static_cast<double>(scores[h].size());
      (entropy > model_.queries[h].entropy ? low : high) = middle;
    }
    query_times_[h] = std::exp2((low + high) / 2);
    for (size_t i = 0; i < drawn.size(); ++i) {
      const Sharpness sharp = SharpnessOf(scores[h][i], query_times_[h]);
      fit.entropy += share * sharp.entropy;
      fit.keys_for_75_mass += share * sharp.keys_for_75_mass;
      fit.peak += share * sharp.peak;
      for (int64_t c = 0; c < d_; ++c) {
        queries.push_back(drawn[i][h * d_ + c] * static_cast<float>(query_times_[h]));
      }
    }
  }
  constexpr int64_t kGapRows = 2048;
  const int64_t rows = tokens_ - kSink, gap_rows = std::min(rows, kGapRows);
  std::vector<float> sample(gap_rows * d_);
  for (int64_t i = 0; i < gap_rows; ++i) {
    const uint16_t* row = k + (kSink + i * rows / gap_rows) * d_;
    for (int64_t c = 0; c < d_; ++c) sample[i * d_ + c] = Bf16ToFloat(row[c]);
  }
  fit.gap = QueryKeyGap(sample, queries, d_);
  return fit;
}

}  // namespace carrel::synth
