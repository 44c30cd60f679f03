#include "kernels/layer/rope/rope_table.h"

#include "common/test_util.h"
#include "kernels/layer/rope/rope.h"

namespace carrel::kernels {
namespace {

TEST(RopeTableTest, TurnsAsRopeDoes_AndBack) {
  std::mt19937_64 rng(TestSeed());
  for (const int64_t dim : {2, 6, 64, 130}) {
    std::vector<float> inv_freq(static_cast<size_t>(dim / 2));
    for (size_t c = 0; c < inv_freq.size(); ++c) {
      inv_freq[c] = std::pow(10000.0f, -2.0f * static_cast<float>(c) / static_cast<float>(dim));
    }
    const RopeTable table(inv_freq, 1000);
    for (const int64_t position : {0, 1, 517, 999, 5000}) {
      const std::vector<float> x = RandomNormal(rng, dim);
      std::vector<float> expected = x, turned(x.size()), back(x.size());
      // Positions beyond the table stand at its end.
      Rope(expected.data(), 1, 1, dim, std::min<int64_t>(position, 999), inv_freq.data());
      table.Turn(x.data(), position, turned.data());
      EXPECT_LE(RelativeError(turned, expected), 1e-6) << dim << " " << position;
      table.TurnBack(turned.data(), position, back.data());
      EXPECT_LE(RelativeError(back, x), 1e-6) << dim << " " << position;
    }
  }
}

}  // namespace
}  // namespace carrel::kernels
