#include "decoder/sampler.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "common/test_util.h"
#include "common/thread_pool.h"

namespace carrel::decoder {
namespace {

TEST(SamplerTest, Greedy_TakesTheLargestAndTheSmallerIdOfTies) {
  Sampler sampler(SamplingConfig{});
  EXPECT_EQ(*sampler.Sample({1.0f, 3.0f, 3.0f, -INFINITY}), 1);
}

TEST(SamplerTest, Temperature_DrawsWithTheSoftmaxsFrequencies) {
  SamplingConfig config;
  config.temperature = 2;
  config.seed = TestSeed();
  Sampler sampler(config);
  const std::vector<float> logits = {0.0f, 2.0f, 4.0f};
  std::vector<double> counts(3);
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) counts[*sampler.Sample(logits)] += 1.0 / kDraws;
  const double total = 1 + std::exp(1.0) + std::exp(2.0);
  // Six standard deviations of a share of 20,000 draws are below 0.022.
  EXPECT_NEAR(counts[0], 1 / total, 0.022);
  EXPECT_NEAR(counts[1], std::exp(1.0) / total, 0.022);
  EXPECT_NEAR(counts[2], std::exp(2.0) / total, 0.022);
}

TEST(SamplerTest, TopP_NeverDrawsFromTheTail) {
  SamplingConfig config;
  config.temperature = 1;
  config.top_p = 0.6;
  config.seed = TestSeed();
  Sampler sampler(config);
  for (int i = 0; i < 1000; ++i) EXPECT_NE(*sampler.Sample({2.0f, 1.0f, -2.0f}), 2);
}

// Where the weights fall steeply, every bound leaves what it says and nothing else.
TEST(SamplerTest, TopKMinPAndTopP_LeaveWhatTheySay) {
  const std::vector<float> logits = {1.0f, 4.0f,  3.0f,
                                     3.5f, -2.0f, 3.0f};  // e^-3 e^0 e^-1 e^-.5 ..
  const auto drawn = [&](const SamplingConfig& config) {
    std::set<TokenId> ids;
    Sampler sampler(config);
    for (int i = 0; i < 4000; ++i) ids.insert(*sampler.Sample(logits));
    return ids;
  };
  const SamplingConfig base = {.temperature = 1, .seed = TestSeed()};
  SamplingConfig top_k = base, min_p = base, both = base, all = base;
  top_k.top_k = 3;  // of equal ones the smaller id
  EXPECT_EQ(drawn(top_k), (std::set<TokenId>{1, 2, 3}));
  top_k.top_k = 1;
  EXPECT_EQ(drawn(top_k), (std::set<TokenId>{1}));
  top_k.top_k = 100;
  EXPECT_EQ(drawn(top_k), (std::set<TokenId>{0, 1, 2, 3, 4, 5}));
  min_p.min_p = 0.3;
  EXPECT_EQ(drawn(min_p), (std::set<TokenId>{1, 2, 3, 5}));
  min_p.min_p = 1;
  EXPECT_EQ(drawn(min_p), (std::set<TokenId>{1}));
  // top_p is a share of what top_k left: 1 of 1.61 is below 0.63, 1 of 2.39 is not above 0.42.
  both.top_k = 2;
  both.top_p = 0.63;
  EXPECT_EQ(drawn(both), (std::set<TokenId>{1, 3}));
  both.top_p = 0.61;
  EXPECT_EQ(drawn(both), (std::set<TokenId>{1}));
  all.top_p = 0.999;
  all.min_p = 0.5;
  EXPECT_EQ(drawn(all), (std::set<TokenId>{1, 3}));
}

TEST(SamplerTest, BoundsThatLeaveAll_ChangeNoDraw) {
  std::mt19937_64 rng(TestSeed());
  const std::vector<float> logits = RandomNormal(rng, 200);
  SamplingConfig plain = {.temperature = 1.3, .seed = rng()};
  SamplingConfig bounded = plain;
  bounded.top_k = 200;
  bounded.min_p = 1e-300;
  Sampler a(plain), b(bounded);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(*a.Sample(logits), *b.Sample(logits));
}

TEST(SamplerTest, RepetitionPenalty_IsThatOfTransformersOnceForEachToken) {
  SamplingConfig config;
  config.repetition_penalty = 2;
  EXPECT_FALSE(config.greedy());
  Sampler sampler(config);
  const std::vector<float> logits = {3.0f, 4.0f, -1.0f, 2.5f};
  EXPECT_EQ(*sampler.Sample(logits), 1);
  sampler.Saw({1, 1, 1});  // 4 / 2, and not 4 / 8
  EXPECT_EQ(*sampler.Sample({1.9f, 4.0f, -1.0f, 1.5f}), 1);
  EXPECT_EQ(*sampler.Sample(logits), 0);
  sampler.Saw({0, 3});
  EXPECT_EQ(*sampler.Sample(logits), 1);
  Sampler negative(config);
  negative.Saw({0});  // -1 * 2
  EXPECT_EQ(*negative.Sample({-1.0f, -1.5f}), 1);
}

TEST(SamplerTest, AdvisedSampling_IsTheModelsWhereItSaysSo) {
  const SamplingConfig otherwise = {.temperature = 0.3, .top_p = 0.8, .seed = 5};
  const auto advised = [&](const model::GenerationDefaults& advice) {
    return AdvisedSampling(advice, otherwise);
  };
  EXPECT_EQ(advised({}).temperature, 0.3);
  EXPECT_EQ(advised({}).top_p, 0.8);
  const SamplingConfig all = advised({.do_sample = true,
                                      .temperature = 0.6,
                                      .top_p = 0.95,
                                      .top_k = 20,
                                      .min_p = 0.1,
                                      .repetition_penalty = 1.05});
  EXPECT_EQ(all.temperature, 0.6);
  EXPECT_EQ(all.top_p, 0.95);
  EXPECT_EQ(all.top_k, 20);
  EXPECT_EQ(all.min_p, 0.1);
  EXPECT_EQ(all.repetition_penalty, 1.05);
  EXPECT_EQ(all.seed, 5u);
  EXPECT_EQ(advised({.do_sample = false, .temperature = 0.6}).temperature, 0);
  EXPECT_EQ(advised({.do_sample = true}).temperature, 1);
  EXPECT_EQ(advised({.top_k = 64}).temperature, 1);
  EXPECT_EQ(advised({.repetition_penalty = 1.1}).temperature, 0.3);
}

TEST(SamplerTest, SameSeed_SameTokens) {
  std::mt19937_64 rng(TestSeed());
  const std::vector<float> logits = RandomNormal(rng, 100);
  SamplingConfig config;
  config.temperature = 1;
  config.seed = 7;
  Sampler a(config), b(config);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(*a.Sample(logits), *b.Sample(logits));
}

// The definition: everything sorted.
TokenId Reference(const std::vector<float>& logits, const SamplingConfig& config, uint64_t random) {
  const float best = *std::max_element(logits.begin(), logits.end());
  std::vector<std::pair<double, TokenId>> tokens;
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    tokens.emplace_back(-std::exp((double{logits[i]} - best) / config.temperature), i);
    total -= tokens.back().first;
  }
  std::sort(tokens.begin(), tokens.end());
  double carried = 0;
  size_t kept = 0;
  while (kept < tokens.size() && carried < config.top_p * total) carried -= tokens[kept++].first;
  double left = static_cast<double>(random >> 11) * 0x1p-53 * carried;
  for (size_t i = 0; i + 1 < kept; ++i) {
    left += tokens[i].first;
    if (left < 0) return tokens[i].second;
  }
  return tokens[kept - 1].second;
}

TEST(SamplerTest, AnyVocabulary_DrawsWhatSortingAllOfItDraws) {
  std::mt19937_64 rng(TestSeed());
  for (const int64_t vocabulary : {1, 2, 7, 8, 65, 1000, 5000}) {
    for (const double top_p : {1.0, 0.95, 0.5}) {
      SamplingConfig config;
      config.temperature = std::uniform_real_distribution<>(0.1, 4)(rng);
      config.top_p = top_p;
      config.seed = rng();
      Sampler sampler(config);
      std::mt19937_64 same(config.seed);
      for (int i = 0; i < 20; ++i) {
        std::vector<float> logits = RandomNormal(rng, vocabulary);
        for (float& logit : logits) logit = std::round(8 * logit) / 4;  // ties
        EXPECT_EQ(*sampler.Sample(logits), Reference(logits, config, same()))
            << vocabulary << " tokens, top_p=" << top_p;
      }
    }
  }
}

TEST(SamplerTest, AnyVocabulary_GreedyTakesTheFirstOfTheLargest) {
  std::mt19937_64 rng(TestSeed());
  Sampler sampler(SamplingConfig{});
  for (const int64_t vocabulary : {1, 7, 8, 9, 100, 4096}) {
    std::vector<float> logits = RandomNormal(rng, vocabulary);
    for (float& logit : logits) logit = std::round(2 * logit) - 3;
    EXPECT_EQ(*sampler.Sample(logits),
              std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
}

TEST(SamplerTest, NotANumber_IsAnError) {
  for (const size_t at : {0, 1, 8, 17}) {
    std::vector<float> logits(18, 1.0f);
    logits[at] = NAN;
    for (const double temperature : {0.0, 1.0}) {
      SamplingConfig config;
      config.temperature = temperature;
      EXPECT_THAT(Sampler(config).Sample(logits),
                  StatusIs(absl::StatusCode::kInternal, absl::StrCat("logit of token ", at)));
    }
  }
}

TEST(SamplerTest, Infinite_IsTaken) {
  SamplingConfig config;
  config.temperature = 1;
  EXPECT_EQ(*Sampler(config).Sample({1.0f, INFINITY, 2.0f}), 1);
  EXPECT_EQ(*Sampler(config).Sample({-INFINITY, -INFINITY}), 0);
}

TEST(SamplingConfigTest, OutOfBounds_IsNamed) {
  SamplingConfig config;
  config.temperature = -1;
  EXPECT_THAT(ValidateSamplingConfig(config),
              StatusIs(absl::StatusCode::kInvalidArgument, "temperature=-1"));
  config.temperature = 1;
  config.top_p = 0;
  EXPECT_THAT(ValidateSamplingConfig(config),
              StatusIs(absl::StatusCode::kInvalidArgument, "top_p=0"));
  const auto refused = [](SamplingConfig bad, const char* what) {
    EXPECT_THAT(ValidateSamplingConfig(bad), StatusIs(absl::StatusCode::kInvalidArgument, what));
  };
  refused({.top_k = -1}, "top_k=-1");
  refused({.min_p = 1.5}, "min_p=1.5");
  refused({.min_p = NAN}, "min_p=nan");
  refused({.repetition_penalty = 0}, "repetition_penalty=0");
  EXPECT_TRUE(ValidateSamplingConfig({.top_k = 5, .min_p = 1, .repetition_penalty = 0.5}).ok());
}

// In pieces, of which the last may be short, and with the largest one in none, one or several of them.
TEST(SamplerTest, GreedyToken_AnyVocabularyAndThreads_IsThatOfTheSampler) {
  std::mt19937_64 rng(TestSeed());
  for (const int threads : {1, 3, 16}) {
    ThreadPool pool(threads - 1);
    for (const size_t size : {size_t{1}, size_t{16384}, size_t{16385}, 1 + rng() % 160000}) {
      std::vector<float> logits(size, -INFINITY);
      EXPECT_EQ(*GreedyToken(logits, &pool), 0);
      for (float& logit : logits) logit = static_cast<float>(rng() % 1000);
      EXPECT_EQ(*GreedyToken(logits, &pool), *Sampler(SamplingConfig()).Sample(logits));
      logits[rng() % size] = NAN;
      const absl::Status expected = Sampler(SamplingConfig()).Sample(logits).status();
      EXPECT_EQ(GreedyToken(logits, &pool).status(), expected);
    }
  }
}

}  // namespace
}  // namespace carrel::decoder
