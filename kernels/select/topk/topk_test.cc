#include "kernels/select/topk/topk.h"

#include <algorithm>
#include <numeric>

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(TopKTest);

void ExpectEqualsReference(const std::vector<float>& scores, int64_t k,
                           std::vector<uint64_t>& scratch) {
  const auto n = static_cast<int64_t>(scores.size());
  std::vector<int64_t> out(static_cast<size_t>(k) + 1, -7),
      expected(static_cast<size_t>(k) + 1, -7);
  const int64_t count = TopK(scores.data(), n, k, out.data(), scratch);
  ASSERT_EQ(count, RefTopK(scores.data(), n, k, expected.data())) << "n " << n << " k " << k;
  ASSERT_EQ(out, expected) << "n " << n << " k " << k;
  ASSERT_EQ(TopKAscending(scores.data(), n, k, out.data(), scratch), count);
  std::sort(expected.begin(), expected.begin() + count);
  ASSERT_EQ(out, expected) << "ascending, n " << n << " k " << k;
}

TEST_P(TopKTest, RandomScores_AnyK_EqualsReference) {
  std::vector<uint64_t> scratch;
  for (int64_t trial = 0; trial < 150; ++trial) {
    const int64_t n = Below(trial % 10 == 0 ? 30000 : 700), k = Below(trial % 3 == 0 ? n + 5 : 130);
    ExpectEqualsReference(RandomNormal(rng_, n), k, scratch);
  }
}

TEST_P(TopKTest, ManyTiesAndSpecialValues_EqualsReference) {
  const float inf = INFINITY;
  const float values[] = {0.0f, -0.0f, 1.0f, -1.0f, inf, -inf, NAN, -NAN, 1e-40f, -1e-40f};
  std::vector<uint64_t> scratch;
  for (int64_t trial = 0; trial < 100; ++trial) {
    std::vector<float> scores(static_cast<size_t>(Below(3000)));
    const int64_t kinds = 1 + Below(10);
    for (float& x : scores) x = values[Below(kinds)];
    ExpectEqualsReference(scores, Below(400), scratch);
  }
}

TEST_P(TopKTest, SortedEitherWay_EqualsReference) {
  std::vector<float> scores(20011);
  std::iota(scores.begin(), scores.end(), -5000.0f);
  std::vector<uint64_t> scratch;
  ExpectEqualsReference(scores, 300, scratch);
  std::reverse(scores.begin(), scores.end());
  ExpectEqualsReference(scores, 300, scratch);
}

TEST_P(TopKTest, OnlyNaN_CountsAsLowest_IndexOrder) {
  std::vector<uint64_t> scratch;
  ExpectEqualsReference(std::vector<float>(1000, NAN), 17, scratch);
  std::vector<float> scores(1000, NAN);
  scores[900] = -1e30f;
  ExpectEqualsReference(scores, 17, scratch);
}

// Scores whose large ones stand exactly where samples of any step look, or never do.
TEST_P(TopKTest, PeriodicScores_EqualsReference) {
  std::vector<uint64_t> scratch;
  for (int64_t step = 2; step < 40; ++step) {
    const int64_t n = 512 * step + Below(512);
    for (const int64_t at : {step / 2, int64_t{0}}) {
      std::vector<float> scores = RandomNormal(rng_, n);
      for (int64_t i = at; i < n; i += step) scores[static_cast<size_t>(i)] += 100;
      ExpectEqualsReference(scores, 1 + Below(700), scratch);
    }
  }
}

TEST_P(TopKTest, KthLargest_EqualsReference) {
  for (int64_t trial = 0; trial < 100; ++trial) {
    const int64_t n = 1 + Below(trial % 5 == 0 ? 20000 : 900), k = 1 + Below(n + 3);
    std::vector<float> scores = RandomNormal(rng_, n);
    for (float& x : scores) x = trial % 2 == 0 ? std::round(2 * x) : x;  // ties
    if (trial % 7 == 0) scores[static_cast<size_t>(Below(n))] = NAN;
    std::vector<int64_t> best(static_cast<size_t>(std::min(n, k)));
    RefTopK(scores.data(), n, k, best.data());
    const float last = scores[static_cast<size_t>(best.back())];
    const float expected = std::isnan(last) ? -INFINITY : last;
    const float bar = KthLargest(scores.data(), n, k);
    ASSERT_EQ(bar, expected) << "n " << n << " k " << k;
    std::sort(best.begin(), best.end());
    ASSERT_EQ(BestIndices(scores, k), best);
  }
}

TEST_P(TopKTest, NoneWantedOrGiven_WritesNothing) {
  std::vector<uint64_t> scratch;
  ExpectEqualsReference({}, 5, scratch);
  ExpectEqualsReference({1.0f, 2.0f}, 0, scratch);
}

}  // namespace
}  // namespace carrel::kernels
