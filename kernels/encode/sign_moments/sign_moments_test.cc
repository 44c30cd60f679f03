#include "kernels/encode/sign_moments/sign_moments.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(SignMomentsTest);

TEST_P(SignMomentsTest, RandomShapes_AddToWhatWasThere_EqualReference) {
  for (int64_t trial = 0; trial < 60; ++trial) {
    const int64_t rows = Below(trial % 3 == 0 ? 300 : 70), columns = Below(trial % 2 ? 140 : 20);
    SCOPED_TRACE(absl::StrCat("rows ", rows, " columns ", columns));
    std::vector<float> y = RandomNormal(rng_, rows * columns);
    for (float& value : y) {
      const uint64_t kind = rng_() % 16;
      if (kind < 4) value = kind == 0 ? 0.0f : kind == 1 ? -0.0f : kind == 2 ? NAN : -INFINITY;
    }
    std::vector<int32_t> positive(static_cast<size_t>(columns + 1), 7);
    std::vector<int32_t> differ(static_cast<size_t>(columns * columns + 1), -3);
    std::vector<float> expected = y;
    std::vector<int32_t> expected_positive = positive, expected_differ = differ;
    AddSignMoments(y.data(), rows, columns, positive.data(), differ.data());
    RefAddSignMoments(expected.data(), rows, columns, expected_positive.data(),
                      expected_differ.data());
    EXPECT_EQ(y, expected);
    EXPECT_EQ(positive, expected_positive);
    EXPECT_EQ(differ, expected_differ);
  }
}

}  // namespace
}  // namespace carrel::kernels
