#include <algorithm>
#include <cmath>
#include <map>

#include "common/test_random.h"
#include "common/test_util.h"
#include "decoder/sources/attended_rows.h"

namespace carrel::decoder {
namespace {

constexpr AttentionShape kShape{2, 4, 2, 8};  // layers, q heads, KV heads, head_dim

// One value for all of a token, by which it is known again.
void AddToken(QueryTrace& trace, float value, int64_t n = 1) {
  std::vector<float> q(static_cast<size_t>(n * kShape.q_heads * kShape.head_dim), -1.0f),
      lse(static_cast<size_t>(n * kShape.q_heads), -1.0f);
  std::fill(q.end() - kShape.q_heads * kShape.head_dim, q.end(), value);
  std::fill(lse.end() - kShape.q_heads, lse.end(), value);
  for (Layer layer(0); layer.value() < kShape.layers; layer = layer.next()) {
    trace.Add(layer, q.data(), lse.data(), n);
  }
}

TEST(QueryTraceTest, OfABlock_TheLastTokenIsKept) {
  QueryTrace trace(kShape);
  EXPECT_FALSE(trace.BeginBlock(false));  // of a prompt, but its last
  AddToken(trace, 7, 3);
  EXPECT_EQ(trace.tokens(), 0);
  EXPECT_FALSE(trace.has(Layer(0)));
  EXPECT_TRUE(trace.BeginBlock(true));
  AddToken(trace, 5, 3);
  ASSERT_EQ(trace.tokens(), 1);
  EXPECT_EQ(trace.q(Layer(1))[kShape.q_heads * kShape.head_dim - 1], 5);
  EXPECT_EQ(trace.lse(Layer(1))[0], 5);
}

TEST(QueryTraceTest, OfALongAnswer_TokensSpreadEvenlyAreKept) {
  QueryTrace trace(kShape);
  constexpr int64_t kSteps = 1000;
  for (int64_t step = 0; step < kSteps; ++step) {
    trace.BeginBlock(true);
    AddToken(trace, static_cast<float>(step));
    ASSERT_LE(trace.tokens(), QueryTrace::kMaxTokens);
    ASSERT_GE(trace.tokens(), std::min<int64_t>(step + 1, QueryTrace::kMaxTokens / 2));
  }
  const std::vector<int64_t>& steps = trace.steps();
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i], static_cast<int64_t>(i) * 16);
    EXPECT_EQ(trace.lse(Layer(0))[i * kShape.q_heads], static_cast<float>(steps[i]));
    EXPECT_EQ(trace.q(Layer(1))[(i + 1) * kShape.q_heads * kShape.head_dim - 1],
              static_cast<float>(steps[i]));
  }
  EXPECT_EQ(steps.size(), static_cast<size_t>((kSteps + 15) / 16));
}

TEST(AttendedRowsTest, OfRowsThatAreHere_SharesAreThoseOfTheSoftmax) {
  std::mt19937_64 rng(TestSeed());
  constexpr int64_t kRows = 20, kFirst = 100;
  const int64_t d = kShape.head_dim;
  QueryTrace trace(kShape);
  trace.BeginBlock(true);
  const std::vector<float> q = RandomNormal(rng, kShape.q_heads * d, 2.0f),
                           k = RandomNormal(rng, kRows * d);
  std::vector<float> lse(kShape.q_heads);
  std::vector<std::vector<double>> scores(kShape.q_heads);
  for (int64_t h = 0; h < kShape.q_heads; ++h) {
    double sum = 0;
    for (int64_t j = 0; j < kRows; ++j) {
      double score = 0;
      for (int64_t c = 0; c < d; ++c) score += double{q[h * d + c]} * k[j * d + c];
      scores[h].push_back(score / std::sqrt(static_cast<double>(d)));
      sum += std::exp(scores[h].back());
    }
    lse[h] = static_cast<float>(std::log(sum));
  }
  trace.Add(Layer(1), q.data(), lse.data(), 1);
  std::vector<AttendedRow> rows;
  AttendedHere(trace, Layer(1), KvHead(1), kShape, kFirst, kRows, k.data(), rows);
  std::map<int32_t, double> sums;
  for (const AttendedRow& row : rows) {
    EXPECT_EQ(row.layer, 1);
    EXPECT_GE(row.q_head, 2);  // of the second KV head
    EXPECT_NEAR(row.share, std::exp(scores[row.q_head][row.position - kFirst] - lse[row.q_head]),
                1e-5);
    EXPECT_GE(row.share, kLeastShare);
    sums[row.q_head] += row.share;
  }
  ASSERT_EQ(sums.size(), 2u);
  for (const auto& [head, sum] : sums) EXPECT_GT(sum, 0.8);  // the others have less than 1% each
  // A layer that added nothing tells nothing.
  std::vector<AttendedRow> none;
  AttendedHere(trace, Layer(0), KvHead(1), kShape, kFirst, kRows, k.data(), none);
  EXPECT_TRUE(none.empty());
}

}  // namespace
}  // namespace carrel::decoder
