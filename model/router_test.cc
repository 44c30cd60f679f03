#include "model/router.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "common/test_util.h"

namespace carrel::model {
namespace {

TEST(ChooseExperts, RandomLogits_EqualSortedSoftmax) {
  std::mt19937_64 rng(TestSeed());
  std::normal_distribution<float> normal(0.0f, 3.0f);
  for (int round = 0; round < 200; ++round) {
    const int64_t experts = 1 + static_cast<int64_t>(rng() % 40);
    const int64_t k = 1 + static_cast<int64_t>(rng() % experts);
    const bool normalize = rng() % 2 == 0;
    std::vector<float> logits(static_cast<size_t>(experts));
    for (float& x : logits) x = normal(rng);
    std::vector<Choice> chosen(static_cast<size_t>(k));
    ChooseExperts(logits.data(), experts, k, normalize, chosen.data());
    std::vector<int> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    order.resize(static_cast<size_t>(k));
    double all = 0, of_chosen = 0;
    for (float x : logits) all += std::exp(double{x});
    for (int e : order) of_chosen += std::exp(double{logits[e]});
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < chosen.size(); ++i) {
      EXPECT_EQ(chosen[i].expert, order[i]);
      EXPECT_NEAR(chosen[i].weight,
                  std::exp(double{logits[order[i]]}) / (normalize ? of_chosen : all), 1e-6);
    }
  }
}

TEST(ChooseExperts, EqualLogits_TakeLowerNumbers) {
  const float logits[] = {1, 2, 2, 2, -INFINITY};
  Choice chosen[2];
  ChooseExperts(logits, 5, 2, true, chosen);
  EXPECT_EQ(chosen[0].expert, 1);
  EXPECT_EQ(chosen[1].expert, 2);
  EXPECT_EQ(chosen[0].weight, 0.5f);
}

TEST(ChooseExperts, LargeLogits_DoNotOverflow) {
  const float logits[] = {1e30f, -1e30f, 1e30f};
  Choice chosen[1];
  ChooseExperts(logits, 3, 1, false, chosen);
  EXPECT_EQ(chosen[0].expert, 0);
  EXPECT_EQ(chosen[0].weight, 0.5f);
}

}  // namespace
}  // namespace carrel::model
