#include "decoder/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "common/test_util.h"
#include "decoder/plan/rates.h"
#include "decoder/plan/way.h"

namespace carrel::decoder {
namespace {

using testing::HasSubstr;

constexpr AttentionShape kShape{24, 14, 2, 64};
constexpr Way kDeviceDense{Place::kDevice, true}, kDevice{Place::kDevice, false},
    kHost{Place::kHost, false}, kStore{Place::kStore, false}, kStoreDense{Place::kStore, true};

PlanQuestion OnGpu() {
  PlanQuestion question;
  question.shape = kShape;
  question.zone_layers = kShape.layers;
  question.zone_rows = 26000;
  question.chosen_rows = int64_t{kShape.layers} * kShape.kv_heads * 400;
  question.promised = 0.03;
  question.device_bytes = int64_t{80} << 30;
  question.model_bytes = int64_t{2} << 30;
  return question;
}

PlanQuestion OnCpu() {
  PlanQuestion question = OnGpu();
  question.unfit[static_cast<size_t>(Place::kHost)] = "opened for one answer";
  question.unfit[static_cast<size_t>(Place::kDevice)] = "the model runs on the CPU";
  return question;
}

Rates GpuRates() { return AssumedRates(model::Device::kCuda, kShape, 16); }
Rates CpuRates() { return AssumedRates(model::Device::kCpu, kShape, 2); }

TEST(WayTest, Names_AreReadAsTheyAreWritten) {
  for (size_t i = 0; i < kWays.size(); ++i) {
    EXPECT_EQ(WayIndex(kWays[i]), i);
    const auto parsed = ParseWay(WayName(kWays[i]));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, kWays[i]);
  }
  EXPECT_THAT(std::string(ParseWay("devise").status().message()),
              HasSubstr("plan=devise is none of auto, store, store-dense, host"));
}

TEST(MakePlanTest, AGpuThatHoldsTheRows_AttendsToAll) {
  const auto plan = MakePlan(OnGpu(), GpuRates());
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->taken().way, kDeviceDense);
  EXPECT_EQ(plan->taken().error, 0);
  EXPECT_THAT(PlanTable(*plan), HasSubstr("plan device-dense: dense attention on the GPU"));
}

TEST(MakePlanTest, WhatDoesNotFit_IsNotTaken_AndSaysBothNumbers) {
  PlanQuestion question = OnGpu();
  question.device_bytes = int64_t{2200} << 20;  // the rows take 305 MiB
  const auto plan = MakePlan(question, GpuRates());
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->taken().way, kHost);
  EXPECT_THAT(plan->ways[WayIndex(kDeviceDense)].unfit,
              HasSubstr("need 2.30 GiB of the GPU's memory"));
  question.host_bytes = 1 << 20;
  EXPECT_EQ(MakePlan(question, GpuRates())->taken().way, kStore);
}

TEST(MakePlanTest, WhereDenseCostsMore_RowsAreSelected) {
  Rates rates = GpuRates();
  rates.of(kDeviceDense).zone_row = 10 * rates.of(kDevice).zone_row;
  PlanQuestion question = OnGpu();
  question.zone_rows = 1000000;
  EXPECT_EQ(MakePlan(question, rates)->taken().way, kDevice);
  EXPECT_DOUBLE_EQ(MakePlan(question, rates)->taken().error, 0.03);
}

TEST(MakePlanTest, OnACpu_ShortZonesAreDense_LongOnesAreSearched) {
  PlanQuestion question = OnCpu();
  question.zone_rows = 200;
  question.chosen_rows = int64_t{kShape.layers} * kShape.kv_heads * 200;
  EXPECT_EQ(MakePlan(question, CpuRates())->taken().way, kStoreDense);
  EXPECT_EQ(MakePlan(OnCpu(), CpuRates())->taken().way, kStore);
}

TEST(MakePlanTest, FlagsLeaveOnlyWhatTheySay) {
  PlanQuestion question = OnGpu();
  question.place = Place::kStore;
  question.dense = false;
  EXPECT_EQ(MakePlan(question, GpuRates())->taken().way, kStore);
  question.place = Place::kDevice;
  EXPECT_EQ(MakePlan(question, GpuRates())->taken().way, kDevice);
}

TEST(MakePlanTest, WithoutAWay_EachReasonIsSaid) {
  PlanQuestion question = OnCpu();
  question.place = Place::kDevice;
  const auto plan = MakePlan(question, CpuRates());
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("device: the model runs on the CPU"));
  EXPECT_THAT(std::string(plan.status().message()), testing::Not(HasSubstr("store")));
}

TEST(MakePlanTest, WithoutMeasurements_NothingIsSelected) {
  PlanQuestion question = OnCpu();
  question.chosen_rows = -1;
  EXPECT_EQ(MakePlan(question, CpuRates())->taken().way, kStoreDense);
}

// The plan is the cheapest of what is fit, whatever the rates are.
TEST(MakePlanTest, RandomRates_TheCheapestFitWayIsTaken) {
  std::mt19937_64 rng(TestSeed());
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int trial = 0; trial < 2000; ++trial) {
    Rates rates;
    for (WayRate& rate : rates.ways)
      rate = {uniform(rng), uniform(rng) * 1e-4, uniform(rng) * 1e-4};
    PlanQuestion question = OnGpu();
    for (std::string& why : question.unfit) why = uniform(rng) < 0.3 ? "no" : "";
    const auto plan = MakePlan(question, rates);
    if (!plan.ok()) {
      for (const std::string& why : question.unfit) EXPECT_FALSE(why.empty());
      continue;
    }
    EXPECT_TRUE(plan->taken().unfit.empty());
    for (const PlannedWay& other : plan->ways) {
      if (other.unfit.empty()) {
        EXPECT_GE(other.seconds, plan->taken().seconds);
      }
    }
  }
}

TEST(FitRateTest, TwoLengths_GiveALine) {
  const WayRate rate = FitRate({1000, 200, 5e-6 + 1000 * 1e-9 + 200 * 2e-9},
                               {9000, 200, 5e-6 + 9000 * 1e-9 + 200 * 2e-9}, 2e-9);
  EXPECT_NEAR(rate.fixed, 5e-6, 1e-12);
  EXPECT_NEAR(rate.zone_row, 1e-9, 1e-15);
  EXPECT_NEAR(rate.Seconds(4000, 100), 5e-6 + 4e-6 + 2e-7, 1e-12);
  // Noise makes no rate negative.
  const WayRate noisy = FitRate({1000, 0, 2e-6}, {9000, 0, 1e-6}, 0);
  EXPECT_GE(noisy.zone_row, 0);
  EXPECT_GE(noisy.fixed, 0);
}

}  // namespace
}  // namespace carrel::decoder
