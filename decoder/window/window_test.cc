#include "decoder/window/window.h"

#include "common/dtype.h"
#include "common/test_util.h"

namespace carrel::decoder {
namespace {

TEST(WindowTest, ContextRowsThenNewTokens_StandInOrderAndTruncateToTheContext) {
  const AttentionShape shape{2, 4, 2, 2};
  Window window(shape);
  const std::vector<uint16_t> k = {FloatToBf16(1), FloatToBf16(2), FloatToBf16(3), FloatToBf16(4)};
  const std::vector<uint16_t> v = {FloatToBf16(5), FloatToBf16(6), FloatToBf16(7), FloatToBf16(8)};
  window.AddContextRows(Layer(1), KvHead(1), k.data(), v.data(), 2);
  window.AddContextRows(Layer(1), KvHead(0), v.data(), k.data(), 2);
  const std::vector<float> new_k = {10, 11, 20, 21},
                           new_v = {30, 31, 40, 41};  // one token, two heads
  window.Append(Layer(1), new_k.data(), new_v.data(), 1);
  EXPECT_EQ(window.context_rows(Layer(1)), 2);
  EXPECT_EQ(window.rows(Layer(1)), 1);
  EXPECT_EQ(window.context_rows(Layer(0)) + window.rows(Layer(0)), 0);
  const auto four = [](const uint16_t* rows) { return std::vector<uint16_t>(rows, rows + 4); };
  const auto two = [](const float* rows) { return std::vector<float>(rows, rows + 2); };
  EXPECT_EQ(four(window.context_k(Layer(1), KvHead(1))), k);
  EXPECT_EQ(four(window.context_v(Layer(1), KvHead(1))), v);
  EXPECT_EQ(four(window.context_k(Layer(1), KvHead(0))), v);
  EXPECT_THAT(two(window.k(Layer(1), KvHead(1))), testing::ElementsAre(20, 21));
  EXPECT_THAT(two(window.v(Layer(1), KvHead(1))), testing::ElementsAre(40, 41));
  EXPECT_THAT(two(window.k(Layer(1), KvHead(0))), testing::ElementsAre(10, 11));
  window.Truncate();
  EXPECT_EQ(window.context_rows(Layer(1)), 2);
  EXPECT_EQ(window.rows(Layer(1)), 0);
  EXPECT_GE(window.bytes(), 2 * 2 * 2 * 2 * 2);
}

TEST(WindowTest, WhatWasAppended_IsCopiedAndComesBack) {
  const AttentionShape shape{2, 4, 2, 2};
  Window window(shape);
  const std::vector<uint16_t> row = {FloatToBf16(1), FloatToBf16(2)};
  for (Layer layer(0); layer.value() < 2; layer = layer.next()) {
    for (KvHead head(0); head.value() < 2; head = head.next()) {
      window.AddContextRows(layer, head, row.data(), row.data(), 1);
    }
    const float base = 100.0f * static_cast<float>(layer.value());
    const std::vector<float> k = {base + 1, base + 2, base + 3, base + 4,  // two tokens, two heads
                                  base + 5, base + 6, base + 7, base + 8};
    window.Append(layer, k.data(), k.data(), 2);
  }
  const std::vector<float> both = window.Copy(2), first = window.Copy(1);
  window.Truncate(1);
  EXPECT_EQ(window.rows(Layer(1)), 1);
  EXPECT_THAT(window.Copy(1), testing::Eq(first));
  ASSERT_TRUE(window.Restore(both, 2));
  EXPECT_EQ(window.rows(Layer(0)), 2);
  EXPECT_THAT(window.Copy(2), testing::Eq(both));
  EXPECT_THAT(std::vector<float>(window.k(Layer(1), KvHead(1)), window.k(Layer(1), KvHead(1)) + 4),
              testing::ElementsAre(103, 104, 107, 108));
  EXPECT_FALSE(window.Restore(first, 2));  // of another size: nothing changes
  EXPECT_EQ(window.rows(Layer(0)), 2);
}

}  // namespace
}  // namespace carrel::decoder
