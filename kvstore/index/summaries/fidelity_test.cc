#include "kvstore/index/summaries/fidelity.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/dtype.h"
#include "common/test_util.h"
#include "kvstore/index/index_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

constexpr int64_t kDim = 32, kGroup = 2;

// Keys and V rows whose cluster matters, and queries of the document: sharp ones attend to the first
// row (a sink) far more than to anything of the zone.
class FidelityTest : public testing::Test {
 protected:
  void Make(int64_t tokens, float sharpness, float sink) {
    keys_ = MakeKeys(rng_, tokens, kDim);
    values_ = MakeKeys(rng_, tokens, kDim);
    sampled_ = {.group = kGroup, .head_dim = kDim};
    KeySet like = keys_;
    for (Position p = 40; p < tokens; p += std::max<int64_t>(1, tokens / 120)) {
      sampled_.positions.push_back(p);
      for (const float x : MakeQueries(rng_, like, kGroup))
        sampled_.queries.push_back(sharpness * x);
    }
    if (sink != 0) {
      // The mean query, long: every query scores it high.
      std::vector<double> mean(kDim);
      for (size_t i = 0; i < sampled_.queries.size(); ++i) {
        sampled_.queries[i] += i % kDim == 0 ? sink : 0.0f;
      }
      for (int64_t c = 0; c < kDim; ++c) keys_.keys[c] = FloatToBf16(c == 0 ? 40.0f : 0.0f);
    }
  }
  absl::StatusOr<HeadFidelity> Measure(int64_t cluster_rows) {
    blob_ = *BuildSummaries(cluster_rows, keys_.AsRows(), values_.AsRows(), &sampled_);
    summaries_ = *Summaries::Open(blob_, keys_.AsRows().count(), kDim);
    return MeasureFidelity(keys_.AsRows(), values_.AsRows(), sampled_, {}, &summaries_);
  }

  std::mt19937_64 rng_{TestSeed()};
  KeySet keys_, values_;
  SampledQueries sampled_;
  std::string blob_;
  Summaries summaries_;
};

// One query by plain loops: |attention to the window and the best rows - dense|^2.
double PlainError(const KeySet& keys, const KeySet& values, const float* q, Position p,
                  int64_t rows, const FidelityPlan& plan) {
  const double scale = 1 / std::sqrt(double{kDim});
  std::vector<std::vector<double>> score(kGroup);
  std::vector<double> lse;
  const Position end = p + 1 - plan.local;
  for (int64_t h = 0; h < kGroup; ++h) {
    for (Position j = 0; j <= p; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < kDim; ++c)
        sum += double{q[h * kDim + c]} * Bf16ToFloat(keys.Row(j)[c]);
      score[h].push_back(sum * scale);
    }
    double total = 0;
    for (Position j = plan.sink; j < end; ++j) total += std::exp(score[h][j]);
    lse.push_back(std::log(total));
  }
  std::vector<std::pair<double, Position>> order;
  for (Position j = plan.sink; j < end; ++j) {
    double best = -INFINITY;
    for (int64_t h = 0; h < kGroup; ++h) best = std::max(best, score[h][j] - lse[h]);
    order.push_back({-best, j});
  }
  std::sort(order.begin(), order.end());
  std::vector<bool> in(static_cast<size_t>(p) + 1, true);
  for (size_t i = static_cast<size_t>(rows); i < order.size(); ++i) in[order[i].second] = false;
  double error = 0;
  for (int64_t h = 0; h < kGroup; ++h) {
    double all = 0, some = 0;
    std::vector<double> dense(kDim), sparse(kDim);
    for (Position j = 0; j <= p; ++j) {
      const double e = std::exp(score[h][j]);
      all += e;
      if (in[j]) some += e;
      for (int64_t c = 0; c < kDim; ++c) {
        dense[c] += e * Bf16ToFloat(values.Row(j)[c]);
        if (in[j]) sparse[c] += e * Bf16ToFloat(values.Row(j)[c]);
      }
    }
    for (int64_t c = 0; c < kDim; ++c) {
      error += std::pow(dense[c] / all - sparse[c] / some, 2) / kGroup;
    }
  }
  return error;
}

TEST_F(FidelityTest, WithoutTheTerm_IsWhatPlainLoopsGive) {
  Make(700, 1, 0);
  FidelityPlan plan;
  plan.max_queries = 1;
  const HeadFidelity one =
      *MeasureFidelity(keys_.AsRows(), values_.AsRows(), sampled_, {}, nullptr, plan);
  ASSERT_EQ(one.queries, 1);
  ASSERT_EQ(one.without.size(), kFidelityBudgets.size());
  EXPECT_TRUE(one.with.empty());
  // The one query is among the sampled ones of the last half.
  double nearest = INFINITY;
  for (int64_t i = 0; i < sampled_.samples(); ++i) {
    const Position p = sampled_.positions[static_cast<size_t>(i)];
    if (p < 350) continue;
    double off = 0;
    for (const size_t b : {0, 2, 4}) {
      const double error =
          PlainError(keys_, values_, sampled_.Query(i, 0), p, kFidelityBudgets[b], plan);
      // Below a hundred-thousandth of the output fp32 rounds.
      off = std::max(off, std::abs(error - one.of_query[0].without[b]) /
                              (error + 1e-5 * one.of_query[0].output));
    }
    nearest = std::min(nearest, off);
  }
  EXPECT_LT(nearest, 1e-2);
}

TEST_F(FidelityTest, MoreRowsLeaveLess_AndTheWholeZoneNothing) {
  Make(900, 1, 0);
  const HeadFidelity measured = *Measure(16);
  EXPECT_GT(measured.queries, 8);
  EXPECT_GT(measured.output, 0);
  for (size_t b = 0; b + 1 < kFidelityBudgets.size(); ++b) {
    EXPECT_LE(measured.without[b + 1], measured.without[b] * 1.05);
  }
  EXPECT_EQ(measured.without.back(), 0);  // 4,096 rows of less than 900
  EXPECT_EQ(measured.with.back(), 0);
}

TEST_F(FidelityTest, FlatAttention_TheTermHelpsMuch) {
  Make(3000, 0.3f, 0);
  const HeadFidelity measured = *Measure(16);
  EXPECT_TRUE(measured.estimate);
  EXPECT_LT(measured.with[3], measured.without[3] / 4);
}

// The zone has next to no mass: a term with all of its spread would give it some (decision 017). What
// is chosen never does harm.
TEST_F(FidelityTest, AttentionSink_TheTermAsItIsChosenDoesNoHarm) {
  Make(3000, 4, 8);
  const HeadFidelity measured = *Measure(40);
  const std::vector<double>& chosen = measured.estimate ? measured.with : measured.without;
  double with = 0, without = 0;
  for (const size_t b : {2, 4, 6}) {  // 32, 128 and 512 rows: what the choice is made by
    with += chosen[b];
    without += measured.without[b];
  }
  EXPECT_LE(with, without);
  if (measured.estimate) {
    EXPECT_LE(with, 0.98 * without);
  }
}

// A probe's query sees sink, the document's last rows and the probe before it; all between is zone.
TEST_F(FidelityTest, Probe_IsWhatPlainLoopsGive) {
  Make(700, 1, 0);
  constexpr int64_t kBehind = 5;
  const KeySet k = MakeKeys(rng_, kBehind, kDim), v = MakeKeys(rng_, kBehind, kDim);
  const std::vector<float> queries = MakeQueries(rng_, keys_, kGroup * kBehind);
  const ProbeQueries probe = {kBehind, queries.data(), k.Row(0), v.Row(0)};
  const HeadFidelity measured =
      *MeasureFidelity(keys_.AsRows(), values_.AsRows(), sampled_, probe, nullptr);
  ASSERT_EQ(measured.probe_queries, kBehind);
  ASSERT_EQ(measured.of_query.size(), static_cast<size_t>(measured.queries));
  // By plain loops the probe is the document's end, and `local` as much longer as it is.
  KeySet all_k = keys_, all_v = values_;
  all_k.keys.insert(all_k.keys.end(), k.keys.begin(), k.keys.end());
  all_v.keys.insert(all_v.keys.end(), v.keys.begin(), v.keys.end());
  for (int64_t i = 0; i < kBehind; ++i) {
    FidelityPlan plan;
    plan.local += i + 1;
    const QueryFidelity& of =
        measured.of_query[static_cast<size_t>(measured.queries - kBehind + i)];
    EXPECT_TRUE(of.of_probe);
    for (const size_t b : {0, 2, 4}) {
      const double error =
          PlainError(all_k, all_v, &queries[i * kGroup * kDim], 700 + i, kFidelityBudgets[b], plan);
      EXPECT_NEAR(of.without[b], error, 1e-2 * error + 1e-5 * of.output) << i << " " << b;
    }
  }
}

// Each query counts by what it leaves of its own output in the layer, and the worse kind counts.
TEST(CombineFidelityTest, IsTheWorseOfDocumentAndProbe_AsSharesOfTheLayersOutputs) {
  const auto query = [](bool of_probe, double output, double error) {
    QueryFidelity of;
    of.of_probe = of_probe;
    of.output = output;
    of.with.fill(error);
    of.without.fill(2 * error);
    return of;
  };
  std::vector<HeadFidelity> layer(2);
  // Outputs of the layer: 2, 4, and 1 of the probe.
  layer[0].of_query = {query(false, 1, 0.2), query(false, 4, 0.4), query(true, 0.5, 0.3)};
  layer[1].of_query = {query(false, 3, 0.2), query(false, 4, 0.8), query(true, 1.5, 0.1)};
  for (HeadFidelity& head : layer) head.queries = 3;
  CombineFidelity(absl::MakeSpan(layer));
  const double output = 7.0 / 3;
  for (const HeadFidelity& head : layer) EXPECT_DOUBLE_EQ(head.output, output);
  EXPECT_NEAR(layer[0].with[0], output * 0.3, 1e-12);                      // the probe's
  EXPECT_NEAR(layer[1].with[0], output * (0.2 / 2 + 0.8 / 4) / 2, 1e-12);  // the document's
  EXPECT_NEAR(layer[1].without[9], output * (0.4 / 2 + 1.6 / 4) / 2, 1e-12);
}

TEST_F(FidelityTest, TooShortOrBadPlan) {
  Make(60, 1, 0);
  const HeadFidelity none =
      *MeasureFidelity(keys_.AsRows(), values_.AsRows(), sampled_, {}, nullptr);
  EXPECT_EQ(none.queries, 0);
  FidelityPlan plan;
  plan.local = 0;
  EXPECT_THAT(MeasureFidelity(keys_.AsRows(), values_.AsRows(), sampled_, {}, nullptr, plan),
              StatusIs(StatusCode::kInvalidArgument, "local=0"));
}

}  // namespace
}  // namespace carrel::kvstore
