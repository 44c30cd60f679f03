#include "kvstore/index/summaries/fidelity.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "common/status.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"

namespace carrel::kvstore {
namespace {

using Floats = std::vector<float>;

constexpr std::array<float, 7> kSpreadShares = {0, 0.05f, 0.1f, 0.2f, 0.35f, 0.6f, 1};
// Of kFidelityBudgets, those that the share is fitted to: 32, 128 and 512 rows.
constexpr std::array<size_t, 3> kFittedBudgets = {2, 4, 6};
// The term must gain this much of the error to be worth its reading.
constexpr double kLeastGain = 0.02;
constexpr int64_t kPieceRows = 4096;  // of the zone, attended at a time

// Partial attention of a group.
struct State {
  Floats out, lse;
  void Reset(int64_t group, int64_t d) {
    out.assign(static_cast<size_t>(group * d), 0.0f);
    lse.assign(static_cast<size_t>(group), -INFINITY);
  }
};

// Of each kind of queries, so many at most.
int64_t MostQueries(const FidelityPlan& plan, int64_t tokens, bool probed) {
  const int64_t kinds = probed ? 2 : 1;
  const int64_t affordable = std::max<int64_t>(4, plan.max_rows / std::max<int64_t>(1, tokens));
  return std::max<int64_t>(1, std::min(plan.max_queries, affordable) / kinds);
}

// So many of `from`, evenly spread.
std::vector<int64_t> Spread(const std::vector<int64_t>& from, int64_t most) {
  const auto all = static_cast<int64_t>(from.size());
  const int64_t wanted = std::min(all, most);
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < wanted; ++i) {
    chosen.push_back(from[static_cast<size_t>((2 * i + 1) * all / (2 * wanted))]);
  }
  return chosen;
}

// Of the samples in the last half of the document those that were held out, or all of them where
// none was.
std::vector<int64_t> ChooseSamples(const SampledQueries& sampled, const FidelityPlan& plan,
                                   int64_t tokens, int64_t most) {
  const std::vector<int64_t> learned = LearnedSamples(sampled);
  std::vector<int64_t> late, held_out;
  for (int64_t i = 0; i < sampled.samples(); ++i) {
    const Position p = sampled.positions[static_cast<size_t>(i)];
    if (p < tokens / 2 || p >= tokens || p + 1 - plan.local <= plan.sink) continue;
    late.push_back(i);
    if (!std::binary_search(learned.begin(), learned.end(), i)) held_out.push_back(i);
  }
  return Spread(held_out.empty() ? late : held_out, most);
}

// None behind a document that is all window.
std::vector<int64_t> ChooseProbe(const ProbeQueries& probe, const FidelityPlan& plan,
                                 int64_t tokens, int64_t most) {
  if (tokens - plan.local <= plan.sink) return {};
  std::vector<int64_t> all(static_cast<size_t>(probe.tokens));
  std::iota(all.begin(), all.end(), 0);
  return Spread(all, most);
}

// What the queries of a head take turns at.
struct MeasureScratch {
  Floats scores, group_scores, selected_scores, bound;
  std::vector<int32_t> ranks;
  std::vector<Position> selected;
  std::vector<int64_t> order;  // rows of the zone, the best first
  std::vector<uint64_t> topk;
  std::vector<const void*> k, v;
  State sparse, rest;
  EstimateScratch estimate;
};

// One query of the group: what dense attention gives, and what is left of it. Of the zone it keeps
// the rows that the largest budget selects.
class QueryMeasure {
 public:
  QueryMeasure(const Rows& keys, const Rows& values, const SampledQueries& sampled,
               const FidelityPlan& plan, MeasureScratch& scratch)
      : keys_(keys),
        values_(values),
        sampled_(sampled),
        plan_(plan),
        s_(scratch),
        group_(sampled.group),
        d_(keys.head_dim()),
        scale_(1.0f / std::sqrt(static_cast<float>(keys.head_dim()))) {}

  // Of the document's samples.
  void StartSample(int64_t sample) {
    const Position p = sampled_.positions[static_cast<size_t>(sample)];
    Start(sampled_.Query(sample, 0), p + 1, nullptr, 0);
  }
  // What a decoder attends to that goes on behind the document.
  void StartProbe(const ProbeQueries& probe, int64_t token) {
    measured_.of_probe = true;
    Start(probe.queries + token * group_ * d_, keys_.count(), &probe, token + 1);
  }

  RowRange zone() const { return zone_; }
  QueryFidelity& measured() { return measured_; }

  // Mean over the group of |out - dense|^2 with the best `rows`, without the term.
  double Select(int64_t rows) {
    rows = std::min<int64_t>(rows, static_cast<int64_t>(best_.size()));
    s_.selected.clear();
    s_.selected_scores.resize(static_cast<size_t>(group_ * rows));
    s_.v.clear();
    s_.bound.clear();
    const auto kept = static_cast<int64_t>(best_.size());
    for (int64_t i = 0; i < kept; ++i) {
      const Best& best = best_[static_cast<size_t>(i)];
      if (best.rank >= rows) continue;
      const auto j = static_cast<int64_t>(s_.selected.size());
      s_.selected.push_back(zone_.begin + best.row);
      s_.v.push_back(values_.Address(s_.selected.back()));
      for (int64_t h = 0; h < group_; ++h) {
        s_.selected_scores[static_cast<size_t>(h * rows + j)] =
            scores_[static_cast<size_t>(h * kept + i)];
        if (best.rank == rows - 1) {
          s_.bound.push_back(best.group_score + zone_lse_[static_cast<size_t>(h)]);
        }
      }
    }
    s_.sparse.Reset(group_, d_);
    Attend(s_.selected_scores, s_.sparse);
    kernels::MergeStates(s_.sparse.out.data(), s_.sparse.lse.data(), window_.out.data(),
                         window_.lse.data(), group_, d_);
    return Square(s_.sparse.out, dense_.out.data());
  }

  // After Select: adds the same with the term, for each share, to errors.
  absl::Status Estimate(const Summaries& summaries, absl::Span<const float> shares,
                        double* errors) {
    s_.rest.Reset(static_cast<int64_t>(shares.size()) * group_, d_);
    retrieval::EstimateRequest params;
    params.queries = q_;
    params.group = group_;
    params.scale = scale_;
    params.zone = zone_;
    params.selected = s_.selected;
    params.scores = s_.selected_scores.data();
    params.bound = s_.bound.data();
    params.spread_shares = shares;
    params.out = s_.rest.out.data();
    params.lse = s_.rest.lse.data();
    RETURN_IF_ERROR(EstimateRest(summaries, values_, params, s_.estimate));
    for (size_t i = 0; i < shares.size(); ++i) {
      float* const out = &s_.rest.out[i * dense_.out.size()];
      kernels::MergeStates(out, &s_.rest.lse[i * dense_.lse.size()], s_.sparse.out.data(),
                           s_.sparse.lse.data(), group_, d_);
      errors[i] += Square({out, dense_.out.size()}, dense_.out.data());
    }
    return absl::OkStatus();
  }

 private:
  // rows: of the document, those before the query's own place, and behind them `behind` of the probe.
  void Start(const float* q, int64_t rows, const ProbeQueries* probe, int64_t behind) {
    q_ = q;
    zone_ = {plan_.sink, rows - plan_.local};
    s_.k.clear();
    s_.v.clear();
    const auto add = [&](Position begin, Position end) {
      for (Position j = begin; j < end; ++j) {
        s_.k.push_back(keys_.Address(j));
        s_.v.push_back(values_.Address(j));
      }
    };
    add(0, zone_.begin);
    add(zone_.end, rows);
    for (int64_t j = 0; j < behind; ++j) {
      s_.k.push_back(probe->k + j * d_);
      s_.v.push_back(probe->v + j * d_);
    }
    AttendWindow();
    ScoreZone();
    AttendZone();
    KeepBest();
    measured_.output = Square(dense_.out, nullptr);
  }

  // A row of the zone that the largest budget selects.
  struct Best {
    int32_t row, rank;
    float group_score;
  };

  // s_.scores [group, zone rows], zone_lse_ [group].
  void ScoreZone() {
    const int64_t rows = zone_.rows();
    s_.scores.resize(static_cast<size_t>(group_ * rows));
    keys_.ForEachPiece(zone_, [&](Position at, const void* address, int64_t count) {
      kernels::DotScore(q_, group_, d_, address, count, scale_,
                        s_.scores.data() + (at - zone_.begin), rows);
    });
    zone_lse_.clear();
    for (int64_t h = 0; h < group_; ++h) {
      zone_lse_.push_back(kernels::LogSumExp(s_.scores.data() + h * rows, rows));
    }
  }

  // In the order of the zone, as EstimateRest wants them: every budget takes those of low rank.
  void KeepBest() {
    const int64_t rows = zone_.rows();
    s_.order.resize(static_cast<size_t>(std::min(kFidelityBudgets.back(), rows)));
    s_.group_scores.resize(static_cast<size_t>(rows));
    kernels::GroupScore(s_.scores.data(), group_, rows, rows, zone_lse_.data(),
                        s_.group_scores.data());
    kernels::TopK(s_.group_scores.data(), rows, static_cast<int64_t>(s_.order.size()),
                  s_.order.data(), s_.topk);
    s_.ranks.assign(static_cast<size_t>(rows), -1);
    for (size_t j = 0; j < s_.order.size(); ++j) {
      s_.ranks[static_cast<size_t>(s_.order[j])] = static_cast<int32_t>(j);
    }
    best_.clear();
    for (size_t row = 0; row < s_.ranks.size(); ++row) {
      if (s_.ranks[row] < 0) continue;
      best_.push_back({static_cast<int32_t>(row), s_.ranks[row], s_.group_scores[row]});
    }
    scores_.clear();
    for (int64_t h = 0; h < group_; ++h) {
      for (const Best& best : best_) {
        scores_.push_back(s_.scores[static_cast<size_t>(h * rows + best.row)]);
      }
    }
  }

  void AttendZone() {
    dense_ = window_;
    State piece;
    Floats scores;
    for (int64_t at = 0; at < zone_.rows(); at += kPieceRows) {
      const int64_t rows = std::min(kPieceRows, zone_.rows() - at);
      s_.v.clear();
      scores.clear();
      for (int64_t j = 0; j < rows; ++j) s_.v.push_back(values_.Address(zone_.begin + at + j));
      for (int64_t h = 0; h < group_; ++h) {
        const float* from = s_.scores.data() + h * zone_.rows() + at;
        scores.insert(scores.end(), from, from + rows);
      }
      piece.Reset(group_, d_);
      Attend(scores, piece);
      kernels::MergeStates(dense_.out.data(), dense_.lse.data(), piece.out.data(), piece.lse.data(),
                           group_, d_);
    }
  }

  // To the rows of s_.v, whose scores are given.
  void Attend(Floats& scores, State& state) {
    kernels::SparseAttentionParams params;
    params.group = group_;
    params.v = s_.v.data();
    params.rows = static_cast<int64_t>(s_.v.size());
    params.head_dim = d_;
    params.scale = scale_;
    params.scores = scores.data();
    params.out = state.out.data();
    params.lse = state.lse.data();
    kernels::SparseAttention(params);
  }

  // To the rows of s_.k and s_.v.
  void AttendWindow() {
    const auto rows = static_cast<int64_t>(s_.k.size());
    Floats scores(static_cast<size_t>(group_ * std::max<int64_t>(1, rows)));
    kernels::DotScoreRows(q_, group_, d_, s_.k.data(), rows, scale_, scores.data(), rows);
    window_.Reset(group_, d_);
    Attend(scores, window_);
  }

  // Mean over the group of |a - b|^2, b null: 0.
  double Square(absl::Span<const float> a, const float* b) const {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      const double x = double{a[i]} - (b == nullptr ? 0.0 : double{b[i]});
      sum += x * x;
    }
    return sum / static_cast<double>(group_);
  }

  const Rows& keys_;
  const Rows& values_;
  const SampledQueries& sampled_;
  const FidelityPlan& plan_;
  MeasureScratch& s_;
  const int64_t group_, d_;
  const float scale_;
  const float* q_ = nullptr;
  RowRange zone_;
  QueryFidelity measured_;
  State window_, dense_;
  std::vector<Best> best_;
  Floats scores_, zone_lse_;  // scores_ [group, best_]
};

constexpr size_t kBudgets = kFidelityBudgets.size(), kShares = kSpreadShares.size();

bool IsFitted(size_t budget) {
  return std::find(kFittedBudgets.begin(), kFittedBudgets.end(), budget) != kFittedBudgets.end();
}

// Over the queries, of the budgets that shares are fitted to: errors as parts of the outputs.
struct Sums {
  double without = 0;
  std::array<double, kShares> with = {};

  size_t BestShare() const {
    return static_cast<size_t>(std::min_element(with.begin(), with.end()) - with.begin());
  }
};

// With the best rows of the budget; and with the term, for each share, of kSpreadShares.
absl::Status MeasureBudget(const Summaries* summaries, size_t budget,
                           absl::Span<const float> shares, QueryMeasure& measure, double* with) {
  if (kFidelityBudgets[budget] >= measure.zone().rows()) return absl::OkStatus();  // no error
  measure.measured().without[budget] = measure.Select(kFidelityBudgets[budget]);
  return summaries == nullptr ? absl::OkStatus() : measure.Estimate(*summaries, shares, with);
}

// Which share, and whether the term is worth it; errors of every query with the one chosen.
absl::Status FitAndMeasure(const Summaries* summaries, std::vector<QueryMeasure>& measures,
                           HeadFidelity& fidelity) {
  Sums sums;
  std::vector<std::array<std::array<double, kShares>, kFittedBudgets.size()>> tried(
      measures.size());
  for (size_t i = 0; i < measures.size(); ++i) {
    for (size_t b = 0; b < kFittedBudgets.size(); ++b) {
      tried[i][b] = {};
      RETURN_IF_ERROR(MeasureBudget(summaries, kFittedBudgets[b], kSpreadShares, measures[i],
                                    tried[i][b].data()));
      for (size_t s = 0; s < kShares; ++s) sums.with[s] += tried[i][b][s];
      sums.without += measures[i].measured().without[kFittedBudgets[b]];
    }
  }
  const size_t best = sums.BestShare();
  for (size_t i = 0; i < measures.size(); ++i) {
    QueryFidelity& measured = measures[i].measured();
    for (size_t b = 0; b < kFittedBudgets.size(); ++b)
      measured.with[kFittedBudgets[b]] = tried[i][b][best];
    for (size_t b = 0; b < kBudgets; ++b) {
      if (IsFitted(b)) continue;
      RETURN_IF_ERROR(
          MeasureBudget(summaries, b, {&kSpreadShares[best], 1}, measures[i], &measured.with[b]));
    }
    fidelity.of_query.push_back(measured);
  }
  if (summaries == nullptr) return absl::OkStatus();
  fidelity.spread_share = kSpreadShares[best];
  fidelity.estimate = sums.with[best] <= (1 - kLeastGain) * sums.without;
  return absl::OkStatus();
}

// What one kind of queries leaves of a head, as shares of the layer's outputs: means over them.
struct Shares {
  std::array<double, kBudgets> with = {}, without = {};
};

// outputs: of the layer, by query.
Shares SharesOf(const HeadFidelity& head, absl::Span<const double> outputs, bool of_probe) {
  Shares shares;
  double queries = 0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const QueryFidelity& of = head.of_query[i];
    if (of.of_probe != of_probe) continue;
    ++queries;
    if (!(outputs[i] > 0)) continue;  // nothing is left of nothing
    for (size_t b = 0; b < kBudgets; ++b) {
      shares.with[b] += of.with[b] / outputs[i];
      shares.without[b] += of.without[b] / outputs[i];
    }
  }
  for (size_t b = 0; b < kBudgets; ++b) {
    shares.with[b] /= std::max(1.0, queries);
    shares.without[b] /= std::max(1.0, queries);
  }
  return shares;
}

}  // namespace

absl::StatusOr<HeadFidelity> MeasureFidelity(const Rows& keys, const Rows& values,
                                             const SampledQueries& sampled,
                                             const ProbeQueries& probe, const Summaries* summaries,
                                             const FidelityPlan& plan) {
  if (plan.sink < 0 || plan.local < 1 || plan.max_queries < 1 || plan.max_rows < 1 ||
      sampled.head_dim != keys.head_dim() || values.count() != keys.count()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fidelity: sink=", plan.sink, " local=", plan.local, " max_queries=", plan.max_queries,
        " max_rows=", plan.max_rows, ", queries of ", sampled.head_dim, ", ", keys.count(),
        " keys of ", keys.head_dim(), " and ", values.count(), " V rows"));
  }
  HeadFidelity fidelity;
  fidelity.spread_share = kDefaultSpreadShare;
  const int64_t most = MostQueries(plan, keys.count(), probe.tokens > 0);
  const std::vector<int64_t> samples = ChooseSamples(sampled, plan, keys.count(), most);
  const std::vector<int64_t> probed = ChooseProbe(probe, plan, keys.count(), most);
  fidelity.queries = static_cast<int64_t>(samples.size() + probed.size());
  fidelity.probe_queries = static_cast<int64_t>(probed.size());
  if (fidelity.queries == 0) {
    fidelity.estimate = summaries != nullptr;
    return fidelity;
  }
  RETURN_IF_ERROR(keys.Verify({0, keys.count()}));
  RETURN_IF_ERROR(values.Verify({0, values.count()}));
  MeasureScratch scratch;
  std::vector<QueryMeasure> measures;
  measures.reserve(static_cast<size_t>(fidelity.queries));
  for (const int64_t sample : samples) {
    measures.emplace_back(keys, values, sampled, plan, scratch).StartSample(sample);
  }
  for (const int64_t token : probed) {
    measures.emplace_back(keys, values, sampled, plan, scratch).StartProbe(probe, token);
  }
  RETURN_IF_ERROR(FitAndMeasure(summaries, measures, fidelity));
  CombineFidelity({&fidelity, 1});
  if (summaries == nullptr) fidelity.with.clear();
  return fidelity;
}

void CombineFidelity(absl::Span<HeadFidelity> layer) {
  if (layer.empty()) return;
  const size_t queries = layer[0].of_query.size();
  std::vector<double> outputs(queries);
  for (const HeadFidelity& head : layer) {
    CARREL_CHECK(head.of_query.size() == queries);
    for (size_t i = 0; i < queries; ++i) {
      outputs[i] += head.of_query[i].output / static_cast<double>(layer.size());
    }
  }
  const double output = std::accumulate(outputs.begin(), outputs.end(), 0.0) /
                        static_cast<double>(std::max<size_t>(1, queries));
  for (HeadFidelity& head : layer) {
    if (queries == 0) continue;
    const Shares own = SharesOf(head, outputs, false), probe = SharesOf(head, outputs, true);
    head.output = output;
    head.with.clear();
    head.without.clear();
    for (size_t b = 0; b < kBudgets; ++b) {
      head.with.push_back(output * std::max(own.with[b], probe.with[b]));
      head.without.push_back(output * std::max(own.without[b], probe.without[b]));
    }
  }
}

}  // namespace carrel::kvstore
