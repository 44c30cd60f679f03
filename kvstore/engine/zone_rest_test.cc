#include "kvstore/engine/zone_rest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "common/dtype.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kGroup = 3, kHeadDim = 32;
constexpr float kScale = 0.25f;

class ZoneRestTest : public testing::Test {
 protected:
  void Make(int64_t tokens) {
    rows_.resize(static_cast<size_t>(tokens * kHeadDim));
    for (uint16_t& x : rows_) x = FloatToBf16(normal_(rng_));
    keys_ = Rows::FromMemory(rows_.data(), tokens, kHeadDim);
    predicted_q_ = Vector(kGroup * kHeadDim, 1);
  }
  std::vector<float> Vector(int64_t n, float size) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& value : x) value = size * normal_(rng_);
    return x;
  }
  // Of q head h, over those.
  double LseOver(const std::vector<Position>& rows, const std::vector<float>& queries, int64_t h) {
    double sum = 0;
    for (const Position j : rows) {
      double dot = 0;
      for (int64_t c = 0; c < kHeadDim; ++c) {
        dot += double{queries[static_cast<size_t>(h * kHeadDim + c)]} *
               double{Bf16ToFloat(rows_[static_cast<size_t>(j * kHeadDim + c)])};
      }
      sum += std::exp(double{kScale} * dot);
    }
    return std::log(sum);
  }
  std::vector<Position> Others(RowRange zone, const std::vector<Position>& given) {
    std::vector<Position> others;
    for (Position j = zone.begin; j < zone.end; ++j) {
      if (!std::binary_search(given.begin(), given.end(), j)) others.push_back(j);
    }
    return others;
  }
  ZoneRest Rest(RowRange zone, const std::vector<Position>& given) {
    const std::vector<Position> all = Others(zone, {});
    std::vector<float> zone_lse, given_lse;
    for (int64_t h = 0; h < kGroup; ++h) {
      zone_lse.push_back(static_cast<float>(LseOver(all, predicted_q_, h)));
      given_lse.push_back(static_cast<float>(LseOver(given, predicted_q_, h)));
    }
    ZoneRestParams params;
    params.keys = &keys_;
    params.zone = zone;
    params.given = given;
    params.queries = predicted_q_.data();
    params.group = kGroup;
    params.scale = kScale;
    params.zone_lse = zone_lse.data();
    params.given_lse = given_lse.data();
    absl::StatusOr<ZoneRest> rest = ZoneRest::Make(params);
    CARREL_EXPECT_OK(rest);
    return *std::move(rest);
  }

  const uint64_t seed_ = TestSeed();
  std::mt19937_64 rng_{seed_};
  std::normal_distribution<float> normal_;
  std::vector<uint16_t> rows_;
  Rows keys_;
  std::vector<float> predicted_q_;
};

TEST_F(ZoneRestTest, TheQueryItWasMadeWith_GivesWhatTheOthersWeigh) {
  Make(1000);
  const RowRange zone{3, 960};
  const std::vector<Position> given{3, 4, 5, 99, 500, 959};
  const ZoneRest rest = Rest(zone, given);
  for (int64_t h = 0; h < kGroup; ++h) {
    EXPECT_NEAR(rest.Lse(h, &predicted_q_[static_cast<size_t>(h * kHeadDim)]),
                LseOver(Others(zone, given), predicted_q_, h), 1e-4);
  }
}

TEST_F(ZoneRestTest, AQueryNearby_IsFollowed) {
  Make(200);  // all of them are the sample
  const RowRange zone{0, 200};
  const std::vector<Position> given{7, 8, 100};
  const ZoneRest rest = Rest(zone, given);
  const std::vector<Position> others = Others(zone, given);
  const std::vector<float> step = Vector(kGroup * kHeadDim, 1);
  for (const float far : {0.01f, 0.1f}) {
    std::vector<float> query = predicted_q_;
    for (size_t i = 0; i < query.size(); ++i) query[i] += far * step[i];
    for (int64_t h = 0; h < kGroup; ++h) {
      const double expected = LseOver(others, query, h);
      const float lse = rest.Lse(h, &query[static_cast<size_t>(h * kHeadDim)]);
      // To first order, and never above. Half the variance of scale * <step, k> is at most about
      // kScale^2 |step|^2 / 2 = 1.
      EXPECT_LT(lse, expected + 1e-4);
      EXPECT_NEAR(lse, expected, 8 * far * far + 1e-4);
    }
  }
}

TEST_F(ZoneRestTest, Sample_IsSpreadOverTheZoneAndHoldsNothingGiven) {
  const RowRange zone{10, 10010};
  const std::vector<Position> all = ZoneRest::Sample(zone, {});
  ASSERT_EQ(static_cast<int64_t>(all.size()), ZoneRest::kSampleRuns * ZoneRest::kSampleRunRows);
  EXPECT_EQ(all.front(), 10);
  EXPECT_GT(all.back(), 9500);
  EXPECT_TRUE(std::is_sorted(all.begin(), all.end()));
  std::vector<Position> less = all;
  less.erase(less.begin() + 5);
  EXPECT_EQ(ZoneRest::Sample(zone, std::vector<Position>{1, all[5], 10009}), less);
  for (const int64_t rows : {0, 1, 7, 31, 33, 255, 257}) {
    const std::vector<Position> few = ZoneRest::Sample({5, 5 + rows}, {});
    EXPECT_LE(static_cast<int64_t>(few.size()), rows);
    EXPECT_EQ(few.empty(), rows == 0);
    for (size_t i = 0; i < few.size(); ++i) {
      EXPECT_TRUE(few[i] >= 5 && few[i] < 5 + rows);
      EXPECT_TRUE(i == 0 || few[i - 1] < few[i]);
    }
  }
}

TEST_F(ZoneRestTest, NothingBesideTheGivenRows_IsMinusInfinity) {
  Make(20);
  for (const RowRange zone : {RowRange{0, 20}, RowRange{4, 4}}) {
    const ZoneRest rest = Rest(zone, Others(zone, {}));
    const std::vector<float> query = Vector(kHeadDim, 5);
    for (int64_t h = 0; h < kGroup; ++h) {
      EXPECT_EQ(rest.Lse(h, query.data()), -std::numeric_limits<float>::infinity());
    }
  }
}

}  // namespace
}  // namespace carrel::kvstore
