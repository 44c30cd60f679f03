#include "synth/head_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/storage/store.h"
#include "synth/random.h"
#include "synth/rotary.h"
#include "synth/sharpness.h"

namespace carrel::synth {
namespace {

using kvstore::Rows;

constexpr int kClusterSteps = 6;
constexpr int64_t kRunTokens = 512;  // rows are sampled in runs: topics are seen to last
constexpr int64_t kGapRows = 2048;

// A verified row, widened.
absl::Status ReadRow(const Rows& rows, Position at, float* out) {
  RETURN_IF_ERROR(rows.VerifyRow(at));
  WidenToFloat(DType::kBf16, rows.Address(at), rows.head_dim(), out);
  return absl::OkStatus();
}

std::vector<Position> SampleRuns(int64_t tokens) {
  const Position first = std::min(kSink, tokens - 1);
  const int64_t rows = tokens - first;
  const int64_t runs = std::max<int64_t>(1, std::min(rows, kSampleRows) / kRunTokens);
  const int64_t length = std::min(rows, kSampleRows) / runs;
  std::vector<Position> positions;
  for (int64_t r = 0; r < runs; ++r) {
    const Position begin = first + (runs == 1 ? 0 : r * (rows - length) / (runs - 1));
    for (int64_t i = 0; i < length; ++i) positions.push_back(begin + i);
  }
  return positions;
}

// k-means; returns each row's cluster. centres [clusters, d].
CARREL_SYNTH_WIDE
void NearestCentres(const std::vector<float>& rows, int64_t d, const std::vector<float>& centres,
                    int64_t clusters, std::vector<int32_t>& nearest) {
  const int64_t n = static_cast<int64_t>(rows.size()) / d;
  std::vector<float> turned(d * clusters), start(clusters), score(clusters);
  for (int64_t t = 0; t < clusters; ++t) {
    for (int64_t c = 0; c < d; ++c) {
      turned[c * clusters + t] = centres[t * d + c];
      start[t] -= 0.5f * centres[t * d + c] * centres[t * d + c];
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    score = start;
    for (int64_t c = 0; c < d; ++c) {
      const float x = rows[i * d + c];
      const float* of_channel = &turned[c * clusters];
      for (int64_t t = 0; t < clusters; ++t) score[t] += x * of_channel[t];
    }
    nearest[i] = static_cast<int32_t>(std::max_element(score.begin(), score.end()) - score.begin());
  }
}

// Means of rows by cluster; a cluster without rows keeps its centre.
void MoveCentres(const std::vector<float>& rows, int64_t d, const std::vector<int32_t>& nearest,
                 int64_t clusters, std::vector<float>& centres, std::vector<float>& weights) {
  std::vector<double> sums(clusters * d);
  std::vector<int64_t> counts(clusters);
  for (size_t i = 0; i < nearest.size(); ++i) {
    ++counts[nearest[i]];
    for (int64_t c = 0; c < d; ++c) sums[nearest[i] * d + c] += rows[i * d + c];
  }
  weights.assign(clusters, 0);
  centres.resize(clusters * d);
  for (int64_t t = 0; t < clusters; ++t) {
    if (counts[t] == 0) continue;
    for (int64_t c = 0; c < d; ++c) {
      centres[t * d + c] = static_cast<float>(sums[t * d + c] / static_cast<double>(counts[t]));
    }
    weights[t] = static_cast<float>(counts[t]) / static_cast<float>(nearest.size());
  }
}

std::vector<float> WithoutCentres(const std::vector<float>& rows, int64_t d,
                                  const std::vector<int32_t>& nearest,
                                  const std::vector<float>& centres) {
  std::vector<float> noise = rows;
  for (size_t i = 0; i < nearest.size(); ++i) {
    for (int64_t c = 0; c < d; ++c) noise[i * d + c] -= centres[nearest[i] * d + c];
  }
  return noise;
}

double Trace(const std::vector<double>& matrix, int64_t d) {
  double trace = 0;
  for (int64_t c = 0; c < d; ++c) trace += matrix[c * d + c];
  return trace;
}

class Measurement {
 public:
  Measurement(const Rows& keys, const Rows& values, const kvstore::SampledQueries& queries,
              double theta)
      : keys_(keys), values_(values), queries_(queries), d_(keys.head_dim()), rotary_(d_, theta) {
    model_.head_dim = d_;
    model_.tokens = keys.count();
  }

  absl::StatusOr<HeadModel> Run() {
    RETURN_IF_ERROR(MeasureRows());
    MeasureQueries();
    RETURN_IF_ERROR(MeasureSharpness());
    return std::move(model_);
  }

 private:
  absl::Status MeasureRows() {
    const std::vector<Position> positions = SampleRuns(keys_.count());
    std::vector<float> k(positions.size() * d_), v(k.size());
    for (size_t i = 0; i < positions.size(); ++i) {
      RETURN_IF_ERROR(ReadRow(keys_, positions[i], &k[i * d_]));
      RETURN_IF_ERROR(ReadRow(values_, positions[i], &v[i * d_]));
      rotary_.Turn(positions[i], &k[i * d_], true);
    }
    const auto n = static_cast<int64_t>(positions.size());
    const int64_t topics = std::clamp<int64_t>(n / 32, 1, kMaxTopics);
    model_.key_topics.resize(topics * d_);
    for (int64_t t = 0; t < topics; ++t) {
      std::copy_n(&k[(t * n / topics) * d_], d_, &model_.key_topics[t * d_]);
    }
    std::vector<int32_t> nearest(positions.size());
    for (int step = 0; step < kClusterSteps; ++step) {
      NearestCentres(k, d_, model_.key_topics, topics, nearest);
      MoveCentres(k, d_, nearest, topics, model_.key_topics, model_.weights);
    }
    MoveCentres(v, d_, nearest, topics, model_.value_topics, model_.weights);
    const auto noise = CovarianceOf(WithoutCentres(k, d_, nearest, model_.key_topics), d_);
    const double total = Trace(CovarianceOf(k, d_), d_);
    model_.fit.topic_share = total > 0 ? 1 - Trace(noise, d_) / total : 0;
    model_.key_noise = Factorise(noise, d_, kNoiseRank);
    model_.value_noise = Factorise(
        CovarianceOf(WithoutCentres(v, d_, nearest, model_.value_topics), d_), d_, kNoiseRank);
    MeasureStay(positions, nearest);
    for (Position at = 0; at < std::min(kSink, keys_.count()); ++at) {
      std::vector<float> row(d_);
      RETURN_IF_ERROR(ReadRow(keys_, at, row.data()));
      rotary_.Turn(at, row.data(), true);
      model_.key_sinks.insert(model_.key_sinks.end(), row.begin(), row.end());
      RETURN_IF_ERROR(ReadRow(values_, at, row.data()));
      model_.value_sinks.insert(model_.value_sinks.end(), row.begin(), row.end());
    }
    return absl::OkStatus();
  }

  // P(same topic as the row before) = stay + (1 - stay) sum of squared weights.
  void MeasureStay(const std::vector<Position>& positions, const std::vector<int32_t>& nearest) {
    double same = 0, pairs = 0, by_chance = 0;
    for (size_t i = 1; i < positions.size(); ++i) {
      if (positions[i] != positions[i - 1] + 1) continue;
      same += nearest[i] == nearest[i - 1];
      ++pairs;
    }
    for (const float weight : model_.weights) by_chance += double{weight} * weight;
    if (pairs == 0 || by_chance >= 1) return;
    model_.stay = std::clamp((same / pairs - by_chance) / (1 - by_chance), 0.0, 0.99);
  }

  void MeasureQueries() {
    model_.queries.resize(queries_.group);
    for (int64_t h = 0; h < queries_.group; ++h) {
      std::vector<float> rows;
      for (int64_t s = 0; s < queries_.samples(); ++s) {
        const float* q = queries_.Query(s, h);
        rows.insert(rows.end(), q, q + d_);
        rotary_.Turn(queries_.positions[s], &rows[s * d_], true);
      }
      model_.queries[h].mean = MeanOf(rows, d_);
      model_.queries[h].spread = Factorise(CovarianceOf(rows, d_), d_, kNoiseRank);
    }
  }

  absl::Status MeasureSharpness() {
    std::vector<int64_t> samples;
    for (int64_t s = 0; s < queries_.samples(); ++s) {
      if (ZoneBefore(queries_.positions[s]).rows() >= std::max(kLeastZone, keys_.count() / 8)) {
        samples.push_back(s);
      }
    }
    if (samples.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("synth: ", queries_.samples(),
                                                     " sampled queries over ", keys_.count(),
                                                     " rows are too few to measure"));
    }
    const auto used = std::min<int64_t>(kSampledZones, static_cast<int64_t>(samples.size()));
    std::vector<float> all_queries;
    double shared = 0, pairs = 0;
    for (int64_t i = 0; i < used; ++i) {
      const int64_t s = samples[(2 * i + 1) * static_cast<int64_t>(samples.size()) / (2 * used)];
      model_.measured.push_back(queries_.positions[s]);
      Position first_best = 0;
      for (int64_t h = 0; h < queries_.group; ++h) {
        const float* q = queries_.Query(s, h);
        ASSIGN_OR_RETURN(const std::vector<float> scores, Scores(q, queries_.positions[s]));
        const Sharpness sharp = SharpnessOf(scores);
        model_.queries[h].peaks.push_back(static_cast<float>(sharp.peak));
        model_.queries[h].entropy += sharp.entropy / static_cast<double>(used);
        Add(sharp, used * queries_.group);
        if (h == 0) first_best = sharp.best;
        if (h > 0) shared += sharp.best == first_best;
        if (h > 0) ++pairs;
        all_queries.insert(all_queries.end(), q, q + d_);
      }
    }
    for (QueryModel& head : model_.queries) std::sort(head.peaks.begin(), head.peaks.end());
    model_.shared_best = pairs > 0 ? shared / pairs : 0;
    const int64_t rows = keys_.count() - kSink, gap_rows = std::min(rows, kGapRows);
    std::vector<float> sample(std::max<int64_t>(gap_rows, 0) * d_);
    for (int64_t i = 0; i < gap_rows; ++i) {
      RETURN_IF_ERROR(ReadRow(keys_, kSink + i * rows / gap_rows, &sample[i * d_]));
    }
    model_.fit.gap = QueryKeyGap(sample, all_queries, d_);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<float>> Scores(const float* q, Position position) {
    const RowRange zone = ZoneBefore(position);
    RETURN_IF_ERROR(keys_.Verify(zone));
    std::vector<float> scores(zone.rows());
    const float scale = 1 / std::sqrt(static_cast<float>(d_));
    std::vector<uint16_t> aligned;
    keys_.ForEachPiece(zone, [&](Position at, const void* rows, int64_t n) {
      aligned.resize(n * d_);  // rows lie at any byte address
      std::memcpy(aligned.data(), rows, aligned.size() * sizeof(uint16_t));
      ScoreRows(q, aligned.data(), n, d_, scale, &scores[at - zone.begin]);
    });
    return scores;
  }

  void Add(const Sharpness& sharp, int64_t count) {
    const double share = 1 / static_cast<double>(count);
    model_.fit.entropy += share * sharp.entropy;
    model_.fit.keys_for_75_mass += share * sharp.keys_for_75_mass;
    model_.fit.peak += share * sharp.peak;
  }

  const Rows& keys_;
  const Rows& values_;
  const kvstore::SampledQueries& queries_;
  const int64_t d_;
  const Rotary rotary_;
  HeadModel model_;
};

}  // namespace

absl::StatusOr<HeadModel> MeasureHead(const kvstore::StoredContext& context, Layer layer,
                                      KvHead kv_head, double theta) {
  ASSIGN_OR_RETURN(const Rows keys, Rows::OpenKeys(context, layer, kv_head));
  ASSIGN_OR_RETURN(const Rows values, Rows::OpenValues(context, layer, kv_head));
  ASSIGN_OR_RETURN(const kvstore::SampledQueries queries,
                   kvstore::ReadSampledQueries(context, layer, kv_head));
  if (keys.count() <= kSink + kLocal || queries.head_dim != keys.head_dim() ||
      keys.head_dim() % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("synth: the source has ", keys.count(), " rows of ", keys.head_dim(),
                     " channels and queries of ", queries.head_dim, ", needs more than ",
                     kSink + kLocal, " rows and an even head_dim"));
  }
  return Measurement(keys, values, queries, theta).Run();
}

}  // namespace carrel::synth
