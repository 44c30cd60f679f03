#include "library/machine_rates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "common/test_util.h"

namespace carrel::library {
namespace {

using testing::HasSubstr;

decoder::Rates Some() {
  decoder::Rates rates = decoder::AssumedRates(model::Device::kCuda, {24, 14, 2, 64}, 8);
  rates.machine = "a GPU, 14 q heads";
  rates.ways[5].measured = true;
  return rates;
}

TEST(RatesTextTest, IsReadAsItWasWritten) {
  const decoder::Rates rates = Some();
  const auto read = RatesFromText(RatesToText(rates), "file");
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->machine, rates.machine);
  for (size_t i = 0; i < rates.ways.size(); ++i) {
    EXPECT_DOUBLE_EQ(read->ways[i].fixed, rates.ways[i].fixed);
    EXPECT_DOUBLE_EQ(read->ways[i].zone_row, rates.ways[i].zone_row);
    EXPECT_DOUBLE_EQ(read->ways[i].chosen_row, rates.ways[i].chosen_row);
    EXPECT_EQ(read->ways[i].measured, rates.ways[i].measured);
  }
}

TEST(RatesTextTest, WhatIsNone_NamesTheFileAndTheField) {
  const std::string text = RatesToText(Some());
  const auto refused = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    const size_t at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    changed.replace(at, from.size(), to);
    const auto read = RatesFromText(changed, "x.rates");
    EXPECT_FALSE(read.ok()) << changed;
    return std::string(read.status().message());
  };
  EXPECT_THAT(refused("\"version\": 2", "\"version\": 3"), HasSubstr("version=3"));
  EXPECT_THAT(refused("\"store-dense\"", "\"shop\""), HasSubstr("store-dense"));
  EXPECT_THAT(refused("\"fixed_s\": ", "\"fixed_s\": -"), HasSubstr("fixed_s"));
  EXPECT_THAT(refused("\"machine\": \"", "\"machine\": 3, \"x\": \""), HasSubstr("x.rates"));
}

TEST(RatesTextTest, AnyBytes_AreReadOrRefused) {
  std::mt19937_64 rng(TestSeed());
  const std::string text = RatesToText(Some());
  for (int trial = 0; trial < 5000; ++trial) {
    std::string changed = text;
    for (uint64_t i = rng() % 4; i < 4; ++i)
      changed[rng() % changed.size()] = static_cast<char>(rng());
    if (rng() % 4 == 0) changed.resize(rng() % changed.size());
    const auto read = RatesFromText(changed, "x");
    if (!read.ok()) continue;
    for (const decoder::WayRate& rate : read->ways) EXPECT_GE(rate.Seconds(1, 1), 0);
  }
}

// What is measured is of the order of what the bytes say, on any machine.
TEST(MeasureRatesTest, OfACpu_AreThere) {
  ThreadPool pool(1);
  const AttentionShape shape{4, 4, 2, 64};
  const auto rates = decoder::MeasureRates(model::Device::kCpu, shape, &pool,
                                           [&](int64_t zone_rows, int64_t budget) {
                                             return TimeHostLayer(shape, zone_rows, budget, &pool);
                                           });
  CARREL_ASSERT_OK(rates);
  constexpr decoder::Way kHost{decoder::Place::kHost, false}, kStore{decoder::Place::kStore, false},
      kStoreDense{decoder::Place::kStore, true}, kDeviceDense{decoder::Place::kDevice, true};
  EXPECT_TRUE(rates->of(kHost).measured);
  EXPECT_FALSE(rates->of(kStore).measured);
  for (const decoder::Way& way : {kHost, kStore, kStoreDense}) {
    EXPECT_GT(rates->of(way).Seconds(16384, 256), 0);
    EXPECT_LT(rates->of(way).Seconds(16384, 256), 1);
  }
  EXPECT_FALSE(rates->of(kDeviceDense).measured);
}

}  // namespace
}  // namespace carrel::library
