// Every method on random rows: its selection holds together, covers the zone when the budget does,
// and finds what it must.
#include "decoder/select/row_selector.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <set>

#include "absl/strings/match.h"
#include "common/dtype.h"
#include "common/test_util.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/random_rows.h"
#include "decoder/zone/make_zone.h"

namespace carrel::decoder {
namespace {

const char* const kMethods[] = {"exact",
                                "hip",
                                "hip:block_k=5,ensemble=4,votes=2,refresh=3",
                                "hip:ensemble=3,votes=3",
                                "hip:widen=16,block_q=4",
                                "infinitehip",
                                "infinitehip:preset=flash,survivors=scaled,block_q=3",
                                "hash:bits=96",
                                "hash:codes=stored,oversample=1",
                                "hash:oversample=3",
                                "channels",
                                "channels:oversample=1",
                                "channels:by=k,share=16",
                                "channels:by=qk,share=8",
                                "pages",
                                "pages:rows=5",
                                "landmarks",
                                "landmarks:chunk=3,outliers=7"};

class RowSelectorTest : public testing::TestWithParam<const char*> {
 protected:
  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(rng_() % static_cast<uint64_t>(bound));
  }
  std::unique_ptr<RowSelector> Make(const AttentionShape& shape, RowRange zone,
                                    const HostRows& rows) {
    auto selector = MakeRowSelector(*ParseSelector(GetParam()), shape, zone, rows, &pool_);
    EXPECT_TRUE(selector.ok()) << selector.status();
    return *std::move(selector);
  }

  std::mt19937_64 rng_{TestSeed()};
  ThreadPool pool_{1};
};
INSTANTIATE_TEST_SUITE_P(Methods, RowSelectorTest, testing::ValuesIn(kMethods),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name)
                             c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
                           return name;
                         });

TEST_P(RowSelectorTest,
       Select_RandomSizes_GivesDistinctRowsOfTheZoneWithinTheBudgetAndTheSameAgain) {
  for (int round = 0; round < 25; ++round) {
    const AttentionShape shape{.layers = 2, .q_heads = 6, .kv_heads = 2, .head_dim = 16};
    const int64_t tokens = 2 + Below(round % 5 == 0 ? 4000 : 300);
    const RandomRows rows(rng_, shape, tokens, 1 + Below(tokens));
    const Position begin = Below(tokens - 1), end = begin + 1 + Below(tokens - begin);
    const RowRange zone{begin, std::min(end, tokens)};
    const std::unique_ptr<RowSelector> selector = Make(shape, zone, rows);
    std::vector<std::vector<Position>> seen[2];
    const uint64_t seed = rng_();
    for (auto& selections : seen) {
      std::mt19937_64 rng(seed);
      selector->StartSequence();
      // As in a layer: one budget for a sequence.
      const int64_t budget =
          1 + static_cast<int64_t>(rng() % static_cast<uint64_t>(zone.rows() + 3));
      for (int64_t step = kPromptStep; step < 9; ++step) {
        const std::vector<float> q = RandomNormal(rng, 3 * shape.head_dim);
        SelectRequest request{.layer = Layer(1), .head = KvHead(1), .q = q.data(), .queries = 3};
        request.budget = budget;
        request.step = step;
        SelectedRows selection;
        selector->Select(request, selection);
        const std::vector<Position>& found = selection.rows;
        ASSERT_FALSE(found.empty());
        ASSERT_LE(static_cast<int64_t>(found.size()), std::min(budget, zone.rows()));
        ASSERT_TRUE(std::is_sorted(found.begin(), found.end()));
        ASSERT_EQ(std::adjacent_find(found.begin(), found.end()), found.end());
        ASSERT_GE(found.front(), zone.begin);
        ASSERT_LT(found.back(), zone.end);
        selections.push_back(found);
      }
    }
    EXPECT_EQ(seen[0], seen[1]);
  }
}

TEST_P(RowSelectorTest, Select_BudgetCoversTheZone_IsEveryRow) {
  const AttentionShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 32};
  for (const int64_t count : {1, 2, 3, 64, 257, 1000}) {
    const RandomRows rows(rng_, shape, count + 10, 100);
    const RowRange zone{4, 4 + count};
    const std::unique_ptr<RowSelector> selector = Make(shape, zone, rows);
    const std::vector<float> q = RandomNormal(rng_, 2 * shape.head_dim);
    for (const int64_t more : {0, 1, 1000}) {
      SelectRequest request{.q = q.data(), .queries = 2, .budget = count + more};
      SelectedRows selection;
      selector->Select(request, selection);
      std::vector<Position> all(static_cast<size_t>(count));
      std::iota(all.begin(), all.end(), zone.begin);
      EXPECT_EQ(selection.rows, all);
    }
  }
}

// One key that the query matches far better than any other, with neighbours that resemble it a
// little less the further they are: what hierarchical methods assume, and no method may miss.
TEST_P(RowSelectorTest, Select_OnePeakWithLocality_IsFound) {
  if (absl::StartsWith(GetParam(), "hash")) {
    GTEST_SKIP() << "signs see directions, and these keys differ by their length along one";
  }
  const AttentionShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 32};
  for (int round = 0; round < 20; ++round) {
    const int64_t tokens = 600;
    RandomRows rows(rng_, shape, tokens, 128);
    std::vector<float> q = RandomNormal(rng_, shape.head_dim);
    double norm = 0;
    for (const float x : q) norm += x * x;
    for (float& x : q) x *= static_cast<float>(4 / std::sqrt(norm));
    const Position peak = 20 + Below(tokens - 40);
    for (Position row = 0; row < tokens; ++row) {
      std::vector<float> key = RandomNormal(rng_, shape.head_dim, 0.01f);
      const double distance = std::abs(static_cast<double>(row - peak)) / tokens;
      for (size_t c = 0; c < key.size(); ++c) key[c] += q[c] * static_cast<float>(1 - 2 * distance);
      rows.SetKey(Layer(0), KvHead(0), row, key);
    }
    const RowRange zone{5, tokens - 7};
    const std::unique_ptr<RowSelector> selector = Make(shape, zone, rows);
    std::vector<float> queries = q;
    queries.insert(queries.end(), q.begin(), q.end());
    SelectRequest request{.q = queries.data(), .queries = 2, .budget = 96};
    SelectedRows selection;
    selector->Select(request, selection);
    EXPECT_TRUE(std::binary_search(selection.rows.begin(), selection.rows.end(), peak))
        << "peak " << peak << ", " << selection.rows.size() << " rows";
  }
}

// The zone's attention at full budget is softmax over every row, in double precision.
TEST_P(RowSelectorTest, HostZone_BudgetOfTheWholeZoneLessOneAndAll_IsDenseWithinItsRows) {
  const AttentionShape shape{.layers = 1, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
  const int64_t tokens = 70 + Below(300);
  auto rows = std::make_shared<RandomRows>(rng_, shape, tokens, 64);
  RetrievalConfig config;
  config.dense_layers = 0;
  const HostZoneOptions options{*ParseSelector(GetParam())};
  config.measure = true;
  for (const select::Selection& selection :
       {select::Selection(select::TopK{tokens - 8}), select::Selection(select::All())}) {
    config.selection = selection;
    auto zone = MakeHostZone(options, {.config = config,
                                       .selections = LayerSelections(config, 1, tokens - 8),
                                       .shape = shape,
                                       .tokens = tokens,
                                       .zone = {3, tokens - 5},
                                       .pool = &pool_,
                                       .rows = rows});
    CARREL_ASSERT_OK(zone);
    const int64_t n = 3;
    const std::vector<float> q = RandomNormal(rng_, n * shape.q_heads * shape.head_dim);
    Partial partial;
    (*zone)->set_reading_prompt(true);
    CARREL_ASSERT_OK((*zone)->Start(Layer(0), q.data(), n));
    CARREL_ASSERT_OK((*zone)->Finish(Layer(0), q.data(), n, partial));
    std::vector<float> expected;
    for (int64_t i = 0; i < n * shape.q_heads; ++i) {
      const KvHead head(static_cast<int32_t>(i % shape.q_heads / shape.group()));
      std::vector<double> out(static_cast<size_t>(shape.head_dim));
      double sum = 0;
      for (Position row = 3; row < tokens - 5; ++row) {
        double dot = 0;
        for (int64_t c = 0; c < shape.head_dim; ++c) {
          dot += double{q[static_cast<size_t>(i * shape.head_dim + c)]} *
                 rows->Key(Layer(0), head, row, c);
        }
        const double weight = std::exp(dot / 4);
        sum += weight;
        for (int64_t c = 0; c < shape.head_dim; ++c) {
          out[static_cast<size_t>(c)] += weight * rows->Value(Layer(0), head, row, c);
        }
      }
      for (const double x : out) expected.push_back(static_cast<float>(x / sum));
    }
    EXPECT_LT(RelativeError(partial.out, expected), 1e-4)
        << "top_k=" << select::TopKRows(selection);
    Partial window;
    window.Reset(n, shape);
    CARREL_ASSERT_OK((*zone)->Measure(Layer(0), q.data(), n, partial, window));
    EXPECT_EQ((*zone)->statistics()[0].rows_attended, (tokens - 8) * shape.kv_heads * n);
    EXPECT_NEAR((*zone)->statistics()[0].mass.value(), 1, 1e-5);
    EXPECT_LT((*zone)->statistics()[0].output_error.value(), 1e-5);
  }
}

// A choice per q head is what each of them would choose alone: the same zone with as many KV heads as
// q heads, which see the same rows.
TEST(QHeadMaskTest, HostZone_IsThatOfQHeadsWithKvHeadsOfTheirOwn) {
  std::mt19937_64 rng{TestSeed()};
  ThreadPool pool(1);
  const AttentionShape shape{.layers = 1, .q_heads = 6, .kv_heads = 2, .head_dim = 16};
  const int64_t tokens = 400, n = 2, d = shape.head_dim;
  auto rows = std::make_shared<RandomRows>(rng, shape, tokens, 64);
  for (const char* method : {"hip", "infinitehip:stages=8:1x:1"}) {
    RetrievalConfig config;
    config.dense_layers = 0;
    config.selection = select::TopK{32};
    HostZoneOptions options{*ParseSelector(method)};
    options.selector.mask = SelectorMask::kQHead;
    config.zone = options;
    const std::vector<float> q = RandomNormal(rng, n * shape.q_heads * d);
    auto zone = MakeHostZone(options, {.config = config,
                                       .selections = LayerSelections(config, 1, tokens - 8),
                                       .shape = shape,
                                       .tokens = tokens,
                                       .zone = {3, tokens - 5},
                                       .pool = &pool,
                                       .rows = rows});
    CARREL_ASSERT_OK(zone);
    Partial partial;
    (*zone)->set_reading_prompt(true);
    CARREL_ASSERT_OK((*zone)->Finish(Layer(0), q.data(), n, partial));
    EXPECT_EQ((*zone)->statistics()[0].rows_attended, 32 * shape.q_heads * n);

    // What one q head's selector chooses, attended in double precision.
    std::vector<float> expected;
    const RowRange range{3, tokens - 5};
    for (int64_t i = 0; i < n * shape.q_heads; ++i) {
      const KvHead head(static_cast<int32_t>(i % shape.q_heads / shape.group()));
      auto selector = MakeRowSelector(*ParseSelector(method), shape, range, *rows, &pool);
      CARREL_ASSERT_OK(selector);
      SelectRequest request{.layer = Layer(0), .head = head, .q = &q[i * d], .queries = 1};
      request.budget = 32;
      SelectedRows selection;
      (*selector)->Select(request, selection);
      std::vector<double> out(static_cast<size_t>(d));
      double sum = 0;
      for (const Position row : selection.rows) {
        double dot = 0;
        for (int64_t c = 0; c < d; ++c) {
          dot += double{q[static_cast<size_t>(i * d + c)]} * rows->Key(Layer(0), head, row, c);
        }
        const double weight = std::exp(dot / 4);
        sum += weight;
        for (int64_t c = 0; c < d; ++c) out[c] += weight * rows->Value(Layer(0), head, row, c);
      }
      for (const double x : out) expected.push_back(static_cast<float>(x / sum));
    }
    EXPECT_LT(RelativeError(partial.out, expected), 1e-4) << method;
  }
}

TEST(HipSelectorTest, Select_WithinTheRefreshInterval_KeepsItsMaskAndReadsNothing) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(0);
  const AttentionShape shape{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16};
  const RandomRows rows(rng, shape, 500, 500);
  const auto selector =
      *MakeRowSelector(*ParseSelector("hip:refresh=4"), shape, {0, 500}, rows, &pool);
  std::vector<Position> mask;
  for (int64_t step = 0; step < 12; ++step) {
    const std::vector<float> q = RandomNormal(rng, shape.head_dim);
    SelectedRows selection;
    selector->Select({.q = q.data(), .queries = 1, .budget = 32, .step = step}, selection);
    if (step % 4 == 0) {
      EXPECT_GT(selection.keys_scored, 0) << step;
      EXPECT_NE(selection.rows, mask) << step;
      mask = selection.rows;
    } else {
      EXPECT_EQ(selection.keys_scored, 0) << step;
      EXPECT_EQ(selection.rows, mask) << step;
    }
  }
}

TEST(InfiniteHipSelectorTest, Select_StepsOfThePreset_EvaluateOnlyTheStagesThatAreDue) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(0);
  const AttentionShape shape{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16};
  const RandomRows rows(rng, shape, 8192, 8192);
  const auto selector = *MakeRowSelector(*ParseSelector("infinitehip:survivors=scaled"), shape,
                                         {0, 8192}, rows, &pool);
  std::vector<int64_t> keys;
  for (int64_t step = 0; step <= 16; ++step) {
    const std::vector<float> q = RandomNormal(rng, shape.head_dim);
    SelectedRows selection;
    selector->Select({.q = q.data(), .queries = 1, .budget = 64, .step = step}, selection);
    EXPECT_EQ(selection.rows.size(), 64u);
    keys.push_back(selection.keys_scored);
  }
  // 32 chunks of 256, then 1024 rows in chunks of 32, then 256 rows in chunks of 8.
  const int64_t first = 32 * 2 * 8, second = 32 * 2 * 5, third = 32 * 2 * 3;
  for (int64_t step = 0; step <= 16; ++step) {
    const int64_t due = step % 16 == 0  ? first + second + third
                        : step % 8 == 0 ? second + third
                        : step % 4 == 0 ? third
                                        : 0;
    EXPECT_EQ(keys[static_cast<size_t>(step)], due) << step;
  }
}

// Group score by its definition (kernels/score/group_score), each query's lse over the candidates.
std::vector<Position> BestByKeys(const RandomRows& rows, KvHead head, const std::vector<float>& q,
                                 const std::vector<Position>& candidates, int64_t budget) {
  const AttentionShape& shape = rows.shape();
  std::vector<std::pair<double, Position>> group_scores;
  for (const Position row : candidates) group_scores.emplace_back(INFINITY, row);
  for (int64_t h = 0; h < shape.group(); ++h) {
    std::vector<double> scores;
    double sum = 0;
    for (const Position row : candidates) {
      double dot = 0;
      for (int64_t c = 0; c < shape.head_dim; ++c) {
        dot += double{q[static_cast<size_t>(h * shape.head_dim + c)]} *
               rows.Key(Layer(0), head, row, c);
      }
      scores.push_back(dot / std::sqrt(static_cast<double>(shape.head_dim)));
      sum += std::exp(scores.back());
    }
    for (size_t i = 0; i < scores.size(); ++i) {
      group_scores[i].first = std::min(group_scores[i].first, std::log(sum) - scores[i]);
    }
  }
  std::sort(group_scores.begin(), group_scores.end());
  std::vector<Position> best;
  for (int64_t i = 0; i < std::min(budget, static_cast<int64_t>(candidates.size())); ++i) {
    best.push_back(group_scores[static_cast<size_t>(i)].second);
  }
  std::sort(best.begin(), best.end());
  return best;
}

TEST(HashSelectorTest, Select_SignsOfRandomDirections_ScoresAsTheDefinition) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(1);
  const AttentionShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
  RandomRows rows(rng, shape, 300, 77);
  const HeadCodes codes = *rows.StoredCodes(Layer(0), KvHead(0));
  const RowRange zone{10, 290};
  const auto selector = *MakeRowSelector(
      *ParseSelector("hash:codes=stored,query=signs,oversample=1"), shape, zone, rows, &pool);
  const std::vector<float> q = RandomNormal(rng, 2 * shape.head_dim);
  std::vector<std::pair<int64_t, Position>> agree;
  for (Position row = zone.begin; row < zone.end; ++row) {
    int64_t sum = 0;
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t b = 0; b < 64; ++b) {
        double dot = 0;
        for (int64_t c = 0; c < 16; ++c) {
          dot += double{q[static_cast<size_t>(h * 16 + c)]} *
                 codes.directions[static_cast<size_t>(b * 16 + c)];
        }
        sum +=
            (dot > 0) == ((codes.words[static_cast<size_t>(row * 2 + b / 32)] >> b % 32 & 1) != 0);
      }
    }
    agree.emplace_back(-sum, row);
  }
  std::sort(agree.begin(), agree.end());
  std::vector<Position> expected;
  for (int i = 0; i < 50; ++i) expected.push_back(agree[static_cast<size_t>(i)].second);
  std::sort(expected.begin(), expected.end());
  SelectedRows selection;
  selector->Select({.q = q.data(), .queries = 2, .budget = 50}, selection);
  EXPECT_EQ(selection.rows, expected);
}

TEST(HashSelectorTest, Select_WeightsOfStoredCodes_TakesTheBestByTheDefinition) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(1);
  const AttentionShape shape{.layers = 1, .q_heads = 3, .kv_heads = 1, .head_dim = 16};
  for (int round = 0; round < 10; ++round) {
    RandomRows rows(rng, shape, 260, 77);
    const HeadCodes codes = *rows.StoredCodes(Layer(0), KvHead(0));
    const RowRange zone{10, 250};
    const auto selector = *MakeRowSelector(*ParseSelector("hash:codes=stored,oversample=1"), shape,
                                           zone, rows, &pool);
    const std::vector<float> q = RandomNormal(rng, 3 * shape.head_dim, 3.0f);
    std::vector<double> best(static_cast<size_t>(zone.rows()), -INFINITY);
    for (int64_t h = 0; h < 3; ++h) {
      std::vector<double> scores;
      double sum = 0;  // of all rows: no more than are sampled
      for (Position row = zone.begin; row < zone.end; ++row) {
        double score = 0;
        for (int64_t b = 0; b < 64; ++b) {
          double dot = 0;
          for (int64_t c = 0; c < 16; ++c) {
            dot += double{q[static_cast<size_t>(h * 16 + c)]} *
                   codes.decoder[static_cast<size_t>(b * 16 + c)];
          }
          const bool set = codes.words[static_cast<size_t>(row * 2 + b / 32)] >> b % 32 & 1;
          score += (set ? dot : -dot) / 4;
        }
        scores.push_back(score);
        sum += std::exp(score);
      }
      for (size_t i = 0; i < scores.size(); ++i) {
        best[i] = std::max(best[i], scores[i] - std::log(sum));
      }
    }
    std::vector<double> sorted(best);
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    SelectedRows selection;
    selector->Select({.q = q.data(), .queries = 3, .budget = 50}, selection);
    ASSERT_EQ(selection.rows.size(), 50u);
    // Tables round: a row may stand a little below those that are left out.
    const double spread = sorted.front() - sorted.back();
    for (const Position row : selection.rows) {
      EXPECT_GE(best[static_cast<size_t>(row - zone.begin)], sorted[49] - 0.1 * spread);
    }
    for (Position row = zone.begin; row < zone.end; ++row) {
      if (std::binary_search(selection.rows.begin(), selection.rows.end(), row)) continue;
      EXPECT_LE(best[static_cast<size_t>(row - zone.begin)], sorted[49] + 0.1 * spread);
    }
  }
}

// Of rows whose scores spread as attention's do, weights find more of the best than signs.
TEST(HashSelectorTest, Select_Weights_FindMoreOfTheBestRowsThanSigns) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(1);
  const AttentionShape shape{.layers = 1, .q_heads = 3, .kv_heads = 1, .head_dim = 64};
  size_t found[2] = {0, 0};
  for (int round = 0; round < 4; ++round) {
    RandomRows rows(rng, shape, 4000, 4000);
    const std::vector<float> q = RandomNormal(rng, 3 * shape.head_dim);
    const auto choose = [&](const char* method) {
      SelectedRows selection;
      (*MakeRowSelector(*ParseSelector(method), shape, {0, 4000}, rows, &pool))
          ->Select({.q = q.data(), .queries = 3, .budget = 100}, selection);
      return selection.rows;
    };
    const std::vector<Position> exact = choose("exact");
    for (const auto& [i, method] : {std::pair{0, "hash:codes=random,query=signs,oversample=4"},
                                    {1, "hash:codes=random,oversample=4"}}) {
      std::vector<Position> both;
      const std::vector<Position> chosen = choose(method);
      std::set_intersection(chosen.begin(), chosen.end(), exact.begin(), exact.end(),
                            std::back_inserter(both));
      found[i] += both.size();
    }
  }
  EXPECT_GT(found[1], found[0]);
}

TEST(HashSelectorTest, Select_OneKeyInTheDirectionOfTheQueryAmongRandomOnes_IsFound) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(1);
  const AttentionShape shape{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64};
  for (int round = 0; round < 10; ++round) {
    RandomRows rows(rng, shape, 1000, 300);
    const std::vector<float> q = RandomNormal(rng, shape.head_dim, 2.0f);
    const auto peak = static_cast<Position>(rng() % 1000);
    rows.SetKey(Layer(0), KvHead(0), peak, q);
    const auto selector = *MakeRowSelector(*ParseSelector("hash:codes=random,oversample=4"), shape,
                                           {0, 1000}, rows, &pool);
    SelectedRows selection;
    selector->Select({.q = q.data(), .queries = 1, .budget = 5}, selection);
    EXPECT_TRUE(std::binary_search(selection.rows.begin(), selection.rows.end(), peak));
  }
}

// Codes and labels choose candidates: what the method alone would select of so many rows. Their
// scores in double precision decide among them.
TEST(OversampleTest, Select_RandomRows_KeepsTheBestOfTheCandidatesByTheirKeys) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(1);
  const AttentionShape shape{.layers = 1, .q_heads = 6, .kv_heads = 2, .head_dim = 32};
  for (const char* method : {"hash:codes=random", "hash:codes=stored", "channels"}) {
    const RandomRows rows(rng, shape, 700, 190);
    const RowRange zone{9, 680};
    const int64_t budget = 1 + static_cast<int64_t>(rng() % 60), group = shape.group();
    for (const int64_t oversample : {2, 5, 64}) {
      SCOPED_TRACE(absl::StrCat(method, " budget ", budget, " oversample ", oversample));
      const char* join = absl::StrContains(method, ':') ? "," : ":";
      const auto make = [&](int64_t x) {
        const SelectorConfig config = *ParseSelector(absl::StrCat(method, join, "oversample=", x));
        return *MakeRowSelector(config, shape, zone, rows, &pool);
      };
      const KvHead head(1);
      const std::vector<float> q = RandomNormal(rng, group * shape.head_dim);
      SelectRequest request{.head = head, .q = q.data(), .queries = group, .budget = budget};
      SelectedRows found, candidates;
      make(oversample)->Select(request, found);
      request.budget = budget * oversample;
      make(1)->Select(request, candidates);
      const std::vector<Position> best = BestByKeys(rows, head, q, candidates.rows, budget);
      EXPECT_EQ(found.rows, best);
      EXPECT_EQ(found.keys_scored, static_cast<int64_t>(candidates.rows.size()));
      EXPECT_EQ(found.bytes_read - found.keys_scored * shape.head_dim * 2, candidates.bytes_read);
      EXPECT_EQ(found.visited - found.keys_scored, candidates.visited);
    }
  }
}

TEST(CandidateCountTest, Auto_IsTwiceTheBudgetButNotFew) {
  EXPECT_EQ(CandidateCount(256, kAutoOversample, {0, 60'000}), 4096);
  EXPECT_EQ(CandidateCount(3000, kAutoOversample, {0, 60'000}), 6000);
  EXPECT_EQ(CandidateCount(256, kAutoOversample, {10, 1010}), 1000);
  EXPECT_EQ(CandidateCount(256, 3, {0, 60'000}), 768);
}

TEST(OversampleTest, Select_EveryRowIsACandidate_IsWhatExactScoresChoose) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(1);
  const AttentionShape shape{.layers = 1, .q_heads = 3, .kv_heads = 1, .head_dim = 64};
  const RandomRows rows(rng, shape, 500, 77);
  const std::vector<float> q = RandomNormal(rng, 3 * shape.head_dim);
  SelectedRows expected;
  (*MakeRowSelector(*ParseSelector("exact"), shape, {3, 500}, rows, &pool))
      ->Select({.q = q.data(), .queries = 3, .budget = 40}, expected);
  for (const char* method : {"hash:oversample=13", "channels:oversample=64"}) {
    SelectedRows found;
    (*MakeRowSelector(*ParseSelector(method), shape, {3, 500}, rows, &pool))
        ->Select({.q = q.data(), .queries = 3, .budget = 40}, found);
    EXPECT_EQ(found.rows, expected.rows) << method;
    EXPECT_EQ(found.keys_scored, 497) << method;
  }
}

TEST(HashSelectorTest, CodesAuto_TakesStoredOnesWhereTheContextHasThem) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(1);
  const AttentionShape shape{.layers = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 32};
  RandomRows rows(rng, shape, 600, 600);
  const std::vector<float> q = RandomNormal(rng, shape.head_dim);
  const auto choose = [&](const char* method) {
    SelectedRows selection;
    (*MakeRowSelector(*ParseSelector(method), shape, {0, 600}, rows, &pool))
        ->Select({.q = q.data(), .queries = 1, .budget = 50}, selection);
    return selection.rows;
  };
  const auto stored = choose("hash:codes=stored,oversample=1");
  const auto random = choose("hash:codes=random,oversample=1");
  EXPECT_NE(stored, random);
  EXPECT_EQ(choose("hash:oversample=1"), stored);
  EXPECT_EQ(choose("hash:oversample=1,seed=0"), random);
  rows.no_codes = true;
  EXPECT_EQ(choose("hash:oversample=1"), random);
}

TEST(MakeRowSelectorTest, WhatTheContextLacks_IsRefused) {
  std::mt19937_64 rng(TestSeed());
  ThreadPool pool(1);
  const AttentionShape shape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 16};
  RandomRows rows(rng, shape, 30, 30);
  rows.no_queries = rows.no_codes = true;
  const auto make = [&](const char* text) {
    return MakeRowSelector(*ParseSelector(text), shape, {0, 30}, rows, &pool).status();
  };
  EXPECT_THAT(make("channels"),
              StatusIs(absl::StatusCode::kNotFound, "method=channels: none are stored"));
  EXPECT_THAT(
      make("hash:codes=stored"),
      StatusIs(absl::StatusCode::kNotFound, "method=hash: layer 0 kv_head 0: no codes are stored"));
  CARREL_EXPECT_OK(make("channels:by=k"));
  CARREL_EXPECT_OK(make("hash"));
}

}  // namespace
}  // namespace carrel::decoder
