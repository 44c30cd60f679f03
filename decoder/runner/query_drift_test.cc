#include "decoder/runner/query_drift.h"

#include <cmath>

#include "common/test_util.h"
#include "kernels/layer/rope/rope.h"

namespace carrel::decoder {
namespace {

constexpr AttentionShape kShape = {.layers = 3, .q_heads = 2, .kv_heads = 1, .head_dim = 8};
constexpr int64_t kWidth = 16;
const Layer kLayer(1);

class QueryDriftTest : public testing::Test {
 protected:
  std::vector<float> Random(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(n * kWidth));
    for (float& value : values) value = normal(rng_);
    return values;
  }
  // What is `lacking` before RoPE, at each of n positions.
  std::vector<float> Turned(const std::vector<float>& lacking, int64_t n, Position first) const {
    std::vector<float> all;
    for (int64_t i = 0; i < n; ++i) all.insert(all.end(), lacking.begin(), lacking.end());
    kernels::RefRope(all.data(), n, kShape.q_heads, kShape.head_dim, first, inv_freq_.data());
    return all;
  }
  static std::vector<float> Sum(const std::vector<float>& a, const std::vector<float>& b) {
    std::vector<float> sum = a;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += b[i];
    return sum;
  }
  static double Distance(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - b[i], 2);
    return std::sqrt(sum);
  }

  std::mt19937_64 rng_{TestSeed()};
  const std::vector<float> inv_freq_ = {1.0f, 0.3f, 0.1f, 0.01f};
  QueryDrift drift_{kShape, inv_freq_, {}};
};

TEST_F(QueryDriftTest, SameLackAtEveryPosition_IsAddedFromTheSecondBlockOn) {
  const std::vector<float> lacking = Random(1);
  Position at = 1000 + static_cast<Position>(rng_() % 1000);
  for (const int64_t n : {5, 1, 3, 1}) {
    const std::vector<float> predicted_q = Random(n), lack = Turned(lacking, n, at);
    const std::vector<float> truth = Sum(predicted_q, lack);
    std::vector<float> corrected = predicted_q;
    drift_.Correct(kLayer, n, at, corrected.data());
    if (n == 5) {
      EXPECT_EQ(corrected, predicted_q);
    } else {
      EXPECT_LT(Distance(corrected, truth), 1e-3 * Distance(predicted_q, truth));
    }
    drift_.Learn(kLayer, n, at, truth.data());
    at += n;
  }
}

TEST_F(QueryDriftTest, LackThatMoves_IsFollowed) {
  std::vector<float> lacking = Random(1);
  double before = 0, after = 0;
  for (Position at = 0; at < 60; ++at) {
    if (at == 20) lacking = Random(1);
    const std::vector<float> predicted_q = Random(1),
                             truth = Sum(predicted_q, Turned(lacking, 1, at));
    std::vector<float> corrected = predicted_q;
    drift_.Correct(kLayer, 1, at, corrected.data());
    if (at >= 50) {
      before += Distance(predicted_q, truth);
      after += Distance(corrected, truth);
    }
    drift_.Learn(kLayer, 1, at, truth.data());
  }
  EXPECT_LT(after, 0.01 * before);
}

TEST_F(QueryDriftTest, LayersAndSequences_KnowNothingOfEachOther) {
  const std::vector<float> predicted_q = Random(1), truth = Random(1);
  std::vector<float> corrected = predicted_q;
  drift_.Correct(kLayer, 1, 7, corrected.data());
  drift_.Learn(kLayer, 1, 7, truth.data());
  drift_.Correct(kLayer.next(), 1, 8, corrected.data());
  EXPECT_EQ(corrected, predicted_q);
  drift_.StartSequence();
  drift_.Correct(kLayer, 1, 8, corrected.data());
  EXPECT_EQ(corrected, predicted_q);
}

TEST_F(QueryDriftTest, TruthWithoutAGuess_TeachesNothing) {
  std::vector<float> predicted_q = Random(1);
  const std::vector<float> same = predicted_q;
  drift_.Learn(kLayer, 1, 7, Random(1).data());
  drift_.Correct(kLayer, 1, 8, predicted_q.data());
  EXPECT_EQ(predicted_q, same);
}

TEST_F(QueryDriftTest, StoredDrift_IsAddedToTheFirstBlock) {
  const std::vector<float> lacking = Random(1), other = Random(1);
  QueryDrift drift(kShape, inv_freq_, {{}, lacking, {}});
  const int64_t n = 3;
  const Position at = static_cast<Position>(rng_() % 100000);
  for (int sequence = 0; sequence < 2; ++sequence) {
    const std::vector<float> predicted_q = Random(n),
                             truth = Sum(predicted_q, Turned(lacking, n, at));
    std::vector<float> corrected = predicted_q;
    drift.Correct(kLayer, n, at, corrected.data());
    EXPECT_LT(Distance(corrected, truth), 1e-5 * Distance(predicted_q, truth));
    std::vector<float> of_another = predicted_q;
    drift.Correct(kLayer.next(), n, at, of_another.data());
    EXPECT_EQ(of_another, predicted_q);
    // From here on tokens lack something else, which the next sequence knows nothing of.
    drift.Learn(kLayer, n, at, Sum(predicted_q, Turned(other, n, at)).data());
    corrected = predicted_q;
    drift.Correct(kLayer, n, at, corrected.data());
    std::vector<float> known(kWidth);
    const float left = std::pow(1 - kNewestDrift, 3.0f);
    for (size_t c = 0; c < known.size(); ++c) known[c] = left * lacking[c] + (1 - left) * other[c];
    EXPECT_LT(Distance(corrected, Sum(predicted_q, Turned(known, n, at))), 1e-4);
    drift.StartSequence();
  }
}

TEST_F(QueryDriftTest, DriftOfAReply_IsCheckedBeforeItIsUsed) {
  StoredDrift drift;
  CARREL_EXPECT_OK(CheckDrift(drift, kShape));
  drift = {{}, Random(1)};
  EXPECT_THAT(CheckDrift(drift, kShape),
              StatusIs(absl::StatusCode::kDataLoss, "query drift of 2 layers, expected 3"));
  drift.push_back(Random(1));
  CARREL_EXPECT_OK(CheckDrift(drift, kShape));
  drift[2].pop_back();
  EXPECT_THAT(CheckDrift(drift, kShape), StatusIs(absl::StatusCode::kDataLoss, "query drift is"));
}

TEST_F(QueryDriftTest, QueriesBeforeRope_AreNotTurned) {
  QueryDrift drift(kShape, {}, {});
  const std::vector<float> lacking = Random(1), predicted_q = Random(1);
  std::vector<float> corrected = predicted_q;
  drift.Correct(kLayer, 1, 7, corrected.data());
  drift.Learn(kLayer, 1, 7, Sum(predicted_q, lacking).data());
  drift.Correct(kLayer, 1, 1000, corrected.data());
  EXPECT_LT(Distance(corrected, Sum(predicted_q, lacking)), 1e-5);
}

}  // namespace
}  // namespace carrel::decoder
