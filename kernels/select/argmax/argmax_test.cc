#include "kernels/select/argmax/argmax.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(ArgmaxTest);

// Few different numbers, so that the largest comes more than once; NaN and infinities among them.
TEST_P(ArgmaxTest, AnyRows_FirstOfTheLargest) {
  for (int trial = 0; trial < 200; ++trial) {
    const int64_t n = Below(5), count = 1 + Below(trial % 3 == 0 ? 300 : 20);
    std::vector<float> x(static_cast<size_t>(n * count));
    for (float& value : x) {
      value = static_cast<float>(Below(trial % 2 == 0 ? 4 : 1000)) - 500;
      if (trial % 5 == 0 && Below(4) == 0) value = NAN;
      if (trial % 7 == 0 && Below(9) == 0) value = Below(2) == 0 ? INFINITY : -INFINITY;
    }
    std::vector<int32_t> id(static_cast<size_t>(n) + 1, -7);
    ArgmaxRows(x.data(), n, count, id.data());
    EXPECT_EQ(id.back(), -7);
    for (int64_t i = 0; i < n; ++i) {
      const float* row = x.data() + i * count;
      int64_t expected = -1;
      for (int64_t j = 0; j < count; ++j) {
        if (!std::isnan(row[j]) && (expected < 0 || row[j] > row[expected])) expected = j;
      }
      ASSERT_EQ(id[static_cast<size_t>(i)], std::max<int64_t>(0, expected)) << "row of " << count;
    }
  }
}

TEST_P(ArgmaxTest, OnlyNan_GivesTheFirst) {
  const std::vector<float> x(37, NAN);
  int32_t id = -1;
  ArgmaxRows(x.data(), 1, 37, &id);
  EXPECT_EQ(id, 0);
}

}  // namespace
}  // namespace carrel::kernels
