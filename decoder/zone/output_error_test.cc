#include "decoder/zone/output_error.h"

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

constexpr AttentionShape kShape{.layers = 1, .q_heads = 2, .kv_heads = 1, .head_dim = 2};

Partial Of(std::vector<float> out, std::vector<float> lse) {
  Partial partial;
  partial.out = std::move(out);
  partial.lse = std::move(lse);
  return partial;
}

TEST(AddOutputErrorsTest, ZoneWithEveryRow_IsZero) {
  const Partial window = Of({1, 2, 3, 4}, {0.5f, -1}), zone = Of({5, 6, 7, 8}, {1, 2});
  Mean error;
  AddOutputErrors(window, zone, zone, 1, kShape, error);
  EXPECT_EQ(error.count, 1);
  EXPECT_EQ(error.value(), 0);
}

// Equal lse: the merge is the mean. Token 0: dense (2, 0, 2, 0), seen (2, 0, 0, 0). Token 1: no
// rows anywhere.
TEST(AddOutputErrorsTest, EachToken_IsRelativeToTheNormOfItsHeadsTogether) {
  const float none = -INFINITY;
  const Partial window = Of({0, 0, 0, 0, 0, 0, 0, 0}, {none, 1, none, none});
  const Partial dense = Of({2, 0, 4, 0, 0, 0, 0, 0}, {0, 1, none, none});
  const Partial seen = Of({2, 0, 0, 0, 0, 0, 0, 0}, {0, none, none, none});
  Mean error;
  AddOutputErrors(window, seen, dense, 2, kShape, error);
  EXPECT_EQ(error.count, 2);
  EXPECT_NEAR(error.sum, std::sqrt(4.0 / 8.0), 1e-6);
}

}  // namespace
}  // namespace carrel::decoder
