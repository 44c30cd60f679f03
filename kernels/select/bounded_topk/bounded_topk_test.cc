#include "kernels/select/bounded_topk/bounded_topk.h"

#include <algorithm>

#include "common/thread_pool.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"
#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(BoundedTopKTest);

struct Case {
  int64_t group = 1, rows = 0, stride = 0;
  std::vector<float> exact, scores, base, error;

  BoundedScores Bounded() const {
    return {scores.data(), group, rows, stride, base.data(), error.data()};
  }
  std::vector<float> GroupScores() const {
    std::vector<float> out(static_cast<size_t>(rows));
    RefGroupScore(exact.data(), group, rows, stride, base.data(), out.data());
    return out;
  }
};

// Every row that the exact scores put among the best, ties included, is scored.
int64_t ExpectHoldsTheBest(const Case& c, int64_t k, BoundedTopK& bounded) {
  const std::vector<float> group_scores = c.GroupScores();
  static ThreadPool pool(2);
  BoundedTopK shared;
  const std::span<const int64_t> first = bounded.First(c.Bounded(), k);
  const std::span<const int64_t> shared_first = shared.First(c.Bounded(), k, &pool);
  EXPECT_TRUE(std::ranges::equal(first, shared_first));
  std::vector<int64_t> scored(first.begin(), first.end());
  EXPECT_TRUE(std::is_sorted(scored.begin(), scored.end()));
  EXPECT_GE(static_cast<int64_t>(scored.size()), std::min(k, c.rows));
  std::vector<float> of_first;
  for (const int64_t row : scored) of_first.push_back(group_scores[static_cast<size_t>(row)]);
  const float of_kth = KthLargest(of_first.data(), static_cast<int64_t>(of_first.size()), k);
  const std::span<const int64_t> others = bounded.Others(of_kth);
  EXPECT_TRUE(std::ranges::equal(others, shared.Others(of_kth)));
  EXPECT_TRUE(std::is_sorted(others.begin(), others.end()));
  scored.insert(scored.end(), others.begin(), others.end());
  std::vector<int64_t> by_place;
  for (const int32_t place : bounded.Ascending()) {
    by_place.push_back(scored[static_cast<size_t>(place)]);
  }
  std::sort(scored.begin(), scored.end());
  EXPECT_EQ(by_place, scored);
  EXPECT_TRUE(std::adjacent_find(scored.begin(), scored.end()) == scored.end()) << "one row twice";
  const float last = KthLargest(group_scores.data(), c.rows, k);
  for (int64_t row = 0; row < c.rows; ++row) {
    if (group_scores[static_cast<size_t>(row)] < last) continue;
    EXPECT_TRUE(std::binary_search(scored.begin(), scored.end(), row))
        << "row " << row << " of " << c.rows << " k " << k;
  }
  return c.rows - static_cast<int64_t>(scored.size());
}

Case RandomCase(std::mt19937_64& rng, int64_t group, int64_t rows, bool ties) {
  Case c{.group = group, .rows = rows, .stride = rows + static_cast<int64_t>(rng() % 9)};
  c.exact = RandomNormal(rng, group * c.stride);
  c.scores.resize(c.exact.size());
  for (int64_t h = 0; h < group; ++h) {
    c.base.push_back(static_cast<float>(static_cast<int64_t>(rng() % 64) - 32) / 2);
    c.error.push_back(rng() % 4 == 0 ? 0.0f : static_cast<float>(rng() % 32) / 64);
    for (int64_t j = 0; j < c.stride; ++j) {
      const auto at = static_cast<size_t>(h * c.stride + j);
      c.exact[at] = 2 * c.exact[at] + c.base.back();
      if (ties) c.exact[at] = std::round(c.exact[at]);
      // As far off as may be, one way or the other.
      c.scores[at] = c.exact[at] + (rng() % 2 == 0 ? c.error.back() : -c.error.back());
    }
  }
  return c;
}

TEST_P(BoundedTopKTest, AsFarOffAsMayBe_HoldsTheBest) {
  BoundedTopK bounded;
  int64_t left_out = 0;
  for (int64_t trial = 0; trial < 120; ++trial) {
    const int64_t rows = 1 + Below(trial % 4 == 0 ? 20000 : 900);
    const Case c = RandomCase(rng_, 1 + Below(5), rows, trial % 3 == 0);
    left_out +=
        ExpectHoldsTheBest(c, 1 + Below(trial % 2 == 0 ? rows + 2 : 1 + rows / 20), bounded);
  }
  EXPECT_GT(left_out, 0);
}

// A bar from a sample that saw only the best, or none of them.
TEST_P(BoundedTopKTest, SampleUnlikeTheRows_HoldsTheBest) {
  BoundedTopK bounded;
  for (int64_t trial = 0; trial < 40; ++trial) {
    Case c = RandomCase(rng_, 1 + Below(3), 5000 + Below(5000), false);
    const int64_t from = Below(c.rows), period = 20 + Below(60);
    for (int64_t h = 0; h < c.group; ++h) {
      for (int64_t j = 0; j < c.rows; ++j) {
        const bool raised = trial % 2 == 0 ? (j + from) % period < 6 : j >= from;
        if (!raised) continue;
        c.exact[static_cast<size_t>(h * c.stride + j)] += 50;
        c.scores[static_cast<size_t>(h * c.stride + j)] += 50;
      }
    }
    ExpectHoldsTheBest(c, 1 + Below(400), bounded);
  }
}

// First's rows turn out to be lower than all that was listed.
TEST_P(BoundedTopKTest, BestBySLookWorst_HoldsTheBest) {
  BoundedTopK bounded;
  Case c = RandomCase(rng_, 1, 8000, false);
  c.error[0] = 40;
  for (int64_t j = 0; j < c.rows; ++j) {
    const auto at = static_cast<size_t>(j);
    c.scores[at] = j % 50 == 7 ? c.exact[at] + 40 : c.exact[at] - 20;
  }
  ExpectHoldsTheBest(c, 100, bounded);
}

// Numbers of which rounding takes as much as the error is.
TEST_P(BoundedTopKTest, LargeNumbersAndNoError_HoldsTheBest) {
  BoundedTopK bounded;
  for (int64_t trial = 0; trial < 20; ++trial) {
    Case c = RandomCase(rng_, 3, 3000, false);
    for (float& error : c.error) error = 0;
    for (float& base : c.base) base += 4000.0f;
    for (float& x : c.exact) x = std::round(x * 8) / 8 + 4000.0f;
    c.scores = c.exact;
    ExpectHoldsTheBest(c, 1 + Below(300), bounded);
  }
}

}  // namespace
}  // namespace carrel::kernels
