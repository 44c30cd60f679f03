#include "decoder/sampler.h"

#include "common/test_util.h"

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

TEST(SamplerTest, SameSeed_SameTokens) {
  std::mt19937_64 rng(TestSeed());
  const std::vector<float> logits = RandomNormal(rng, 100);
  SamplingConfig config;
  config.temperature = 1;
  config.seed = 7;
  Sampler a(config), b(config);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(*a.Sample(logits), *b.Sample(logits));
}

TEST(SamplerTest, NotANumber_IsAnError) {
  Sampler sampler(SamplingConfig{});
  EXPECT_THAT(sampler.Sample({1.0f, NAN}),
              StatusIs(absl::StatusCode::kInternal, "logit of token 1"));
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
}

}  // namespace
}  // namespace carrel::decoder
