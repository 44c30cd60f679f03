#include "kvstore/index/summaries/fidelity.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

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

// Of the samples in the last half of the document those that were held out, or all of them where
// none was; evenly chosen.
std::vector<int64_t> ChooseSamples(const SampledQueries& sampled, const FidelityPlan& plan,
                                   int64_t tokens) {
  const std::vector<int64_t> learned = LearnedSamples(sampled);
  std::vector<int64_t> late, held_out;
  for (int64_t i = 0; i < sampled.samples(); ++i) {
    const Position p = sampled.positions[static_cast<size_t>(i)];
    if (p < tokens / 2 || p >= tokens || p + 1 - plan.local <= plan.sink) continue;
    late.push_back(i);
    if (!std::binary_search(learned.begin(), learned.end(), i)) held_out.push_back(i);
  }
  const std::vector<int64_t>& from = held_out.empty() ? late : held_out;
  const auto all = static_cast<int64_t>(from.size());
  const int64_t affordable = std::max<int64_t>(4, plan.max_rows / std::max<int64_t>(1, tokens));
  const int64_t wanted = std::min({all, plan.max_queries, affordable});
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < wanted; ++i) {
    chosen.push_back(from[static_cast<size_t>((2 * i + 1) * all / (2 * wanted))]);
  }
  return chosen;
}

// What the queries of a head take turns at.
struct MeasureScratch {
  Floats scores, group_scores, selected_scores, bound;
  std::vector<int32_t> ranks;
  std::vector<Position> window_rows, selected;
  std::vector<int64_t> order;  // rows of the zone, the best first
  std::vector<uint64_t> topk;
  std::vector<const void*> v;
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

  void Start(int64_t sample) {
    q_ = sampled_.Query(sample, 0);
    const Position p = sampled_.positions[static_cast<size_t>(sample)];
    zone_ = {plan_.sink, p + 1 - plan_.local};
    s_.window_rows.clear();
    for (Position j = 0; j < plan_.sink; ++j) s_.window_rows.push_back(j);
    for (Position j = zone_.end; j <= p; ++j) s_.window_rows.push_back(j);
    AttendRows(s_.window_rows, window_);
    ScoreZone();
    AttendZone();
    KeepBest();
  }

  double output() const { return Square(dense_.out, nullptr); }
  RowRange zone() const { return zone_; }

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
    EstimateParams params;
    params.queries = q_;
    params.group = group_;
    params.scale = scale_;
    params.zone = zone_;
    params.values = &values_;
    params.selected = s_.selected;
    params.scores = s_.selected_scores.data();
    params.bound = s_.bound.data();
    params.spread_shares = shares;
    params.out = s_.rest.out.data();
    params.lse = s_.rest.lse.data();
    RETURN_IF_ERROR(EstimateRest(summaries, params, s_.estimate));
    for (size_t i = 0; i < shares.size(); ++i) {
      float* const out = &s_.rest.out[i * dense_.out.size()];
      kernels::MergeStates(out, &s_.rest.lse[i * dense_.lse.size()], s_.sparse.out.data(),
                           s_.sparse.lse.data(), group_, d_);
      errors[i] += Square({out, dense_.out.size()}, dense_.out.data());
    }
    return absl::OkStatus();
  }

 private:
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

  void AttendRows(const std::vector<Position>& rows, State& state) {
    std::vector<const void*> k;
    s_.v.clear();
    for (const Position j : rows) {
      k.push_back(keys_.Address(j));
      s_.v.push_back(values_.Address(j));
    }
    Floats scores(static_cast<size_t>(group_) * std::max<size_t>(1, rows.size()));
    kernels::DotScoreRows(q_, group_, d_, k.data(), static_cast<int64_t>(k.size()), scale_,
                          scores.data(), static_cast<int64_t>(k.size()));
    state.Reset(group_, d_);
    Attend(scores, state);
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
  State window_, dense_;
  std::vector<Best> best_;
  Floats scores_, zone_lse_;  // scores_ [group, best_]
};

constexpr size_t kBudgets = kFidelityBudgets.size(), kShares = kSpreadShares.size();

// Over the queries.
struct Sums {
  std::array<double, kBudgets> without = {};
  std::array<std::array<double, kShares>, kBudgets> with = {};

  // Of the budgets that shares are fitted to.
  double OfShare(size_t share) const {
    double sum = 0;
    for (const size_t b : kFittedBudgets) sum += with[b][share];
    return sum;
  }
  double Without() const {
    double sum = 0;
    for (const size_t b : kFittedBudgets) sum += without[b];
    return sum;
  }
  size_t BestShare() const {
    size_t best = 0;
    for (size_t s = 1; s < kShares; ++s) {
      if (OfShare(s) < OfShare(best)) best = s;
    }
    return best;
  }
};

// shares: of kSpreadShares; with no summaries, none counts.
absl::Status AddBudget(const Summaries* summaries, size_t budget, absl::Span<const float> shares,
                       QueryMeasure& measure, Sums& sums) {
  if (kFidelityBudgets[budget] >= measure.zone().rows()) return absl::OkStatus();  // no error
  sums.without[budget] += measure.Select(kFidelityBudgets[budget]);
  if (summaries == nullptr) return absl::OkStatus();
  const auto first = static_cast<size_t>(shares.data() - kSpreadShares.data());
  return measure.Estimate(*summaries, shares, &sums.with[budget][first]);
}

}  // namespace

absl::StatusOr<HeadFidelity> MeasureFidelity(const Rows& keys, const Rows& values,
                                             const SampledQueries& sampled,
                                             const Summaries* summaries, const FidelityPlan& plan) {
  if (plan.sink < 0 || plan.local < 1 || plan.max_queries < 1 || plan.max_rows < 1 ||
      sampled.head_dim != keys.head_dim() || values.count() != keys.count()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fidelity: sink=", plan.sink, " local=", plan.local, " max_queries=", plan.max_queries,
        " max_rows=", plan.max_rows, ", queries of ", sampled.head_dim, ", ", keys.count(),
        " keys of ", keys.head_dim(), " and ", values.count(), " V rows"));
  }
  HeadFidelity fidelity;
  fidelity.spread_share = kDefaultSpreadShare;
  const std::vector<int64_t> samples = ChooseSamples(sampled, plan, keys.count());
  if (samples.empty()) {
    fidelity.estimate = summaries != nullptr;
    return fidelity;
  }
  RETURN_IF_ERROR(keys.Verify({0, keys.count()}));
  RETURN_IF_ERROR(values.Verify({0, values.count()}));
  Sums sums;
  MeasureScratch scratch;
  std::vector<QueryMeasure> measures;
  measures.reserve(samples.size());
  // All shares for the budgets that they are fitted to; the other budgets with the one chosen.
  for (const int64_t sample : samples) {
    QueryMeasure& measure = measures.emplace_back(keys, values, sampled, plan, scratch);
    measure.Start(sample);
    fidelity.output += measure.output();
    for (const size_t b : kFittedBudgets) {
      RETURN_IF_ERROR(AddBudget(summaries, b, kSpreadShares, measure, sums));
    }
  }
  const size_t best = sums.BestShare();
  for (QueryMeasure& measure : measures) {
    for (size_t b = 0; b < kBudgets; ++b) {
      if (std::find(kFittedBudgets.begin(), kFittedBudgets.end(), b) != kFittedBudgets.end())
        continue;
      RETURN_IF_ERROR(AddBudget(summaries, b, {&kSpreadShares[best], 1}, measure, sums));
    }
  }
  const auto n = static_cast<double>(samples.size());
  fidelity.queries = static_cast<int64_t>(samples.size());
  fidelity.output /= n;
  for (const double error : sums.without) fidelity.without.push_back(error / n);
  if (summaries == nullptr) return fidelity;
  fidelity.spread_share = kSpreadShares[best];
  fidelity.estimate = sums.OfShare(best) <= (1 - kLeastGain) * sums.Without();
  for (size_t b = 0; b < kBudgets; ++b) fidelity.with.push_back(sums.with[b][best] / n);
  return fidelity;
}

}  // namespace carrel::kvstore
