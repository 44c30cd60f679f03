#include "kvstore/index/building/small_matrices.h"

#include <cmath>

#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

TEST(SmallMatricesTest, SolveCholesky_AnySize_SolvesAndLeavesTheFactorBelowTheDiagonal) {
  std::mt19937_64 rng(TestSeed());
  std::normal_distribution<double> normal;
  for (const auto& [n, columns] :
       {std::pair<int64_t, int64_t>{1, 1}, {2, 0}, {7, 3}, {8, 8}, {33, 17}, {128, 20}}) {
    SCOPED_TRACE(testing::Message() << "n " << n << " columns " << columns);
    std::vector<double> half(static_cast<size_t>(n * n)), x(static_cast<size_t>(n * columns));
    for (double& h : half) h = normal(rng);
    for (double& v : x) v = normal(rng);
    std::vector<double> a(half.size()), b(x.size());
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t k = 0; k < n; ++k) a[i * n + j] += half[i * n + k] * half[j * n + k];
        if (i == j) a[i * n + j] += 1;
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t c = 0; c < columns; ++c) {
        for (int64_t k = 0; k < n; ++k) b[i * columns + c] += a[i * n + k] * x[k * columns + c];
      }
    }
    std::vector<double> factor = a;
    SolveCholesky(factor, n, b, columns);
    for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(b[i], x[i], 1e-8);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        double product = 0;
        for (int64_t k = 0; k <= j; ++k) product += factor[i * n + k] * factor[j * n + k];
        EXPECT_NEAR(product, a[i * n + j], 1e-9 * static_cast<double>(n * n));
      }
    }
  }
}

TEST(SmallMatricesTest, MeanOf_AnyWidth_IsTheMean) {
  std::mt19937_64 rng(TestSeed());
  std::normal_distribution<float> normal(3, 1);
  for (const int64_t d : {1, 7, 8, 30}) {
    Floats x(static_cast<size_t>(50 * d));
    for (float& v : x) v = normal(rng);
    const Floats mean = MeanOf(x, 50, d);
    ASSERT_EQ(static_cast<int64_t>(mean.size()), d);
    for (int64_t c = 0; c < d; ++c) {
      double sum = 0;
      for (int64_t i = 0; i < 50; ++i) sum += x[i * d + c];
      EXPECT_NEAR(mean[c], sum / 50, 1e-5);
    }
  }
}

}  // namespace
}  // namespace carrel::kvstore
