#include "decoder/config.h"

#include <numeric>

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

TEST(LayerBudgetsTest, Uniform_GivesEachSparseLayerTheSame) {
  RetrievalConfig config;
  config.top_k = 100;
  config.dense_layers = 2;
  EXPECT_EQ(LayerBudgets(config, 5, 1000),
            (std::vector<int64_t>{kAllRows, kAllRows, 100, 100, 100}));
}

TEST(LayerBudgetsTest, Linear_RisesWithTheSameTotal) {
  RetrievalConfig config;
  config.top_k = 128;
  config.dense_layers = 2;
  config.budget = Budget::kLinear;
  const std::vector<int64_t> budgets = LayerBudgets(config, 34, 100000);
  EXPECT_EQ(budgets[2], 64);
  EXPECT_EQ(budgets[33], 192);
  EXPECT_TRUE(std::is_sorted(budgets.begin() + 2, budgets.end()));
  EXPECT_NEAR(std::accumulate(budgets.begin() + 2, budgets.end(), 0.0), 128.0 * 32, 16);
}

TEST(LayerBudgetsTest, Measured_GivesMoreWhereAttentionIsPeaked) {
  RetrievalConfig config;
  config.top_k = 100;
  config.dense_layers = 1;
  config.budget = Budget::kMeasured;
  config.layer_entropy_nats = {9, 6, 3, 3};
  EXPECT_EQ(LayerBudgets(config, 4, 100000), (std::vector<int64_t>{kAllRows, 57, 121, 121}));
  EXPECT_EQ(LayerBudgets(config, 4, 120), (std::vector<int64_t>{kAllRows, 57, kAllRows, kAllRows}));
  config.layer_entropy_nats = {0, 0, 0, 0};
  EXPECT_EQ(LayerBudgets(config, 4, 100000), (std::vector<int64_t>{kAllRows, 100, 100, 100}));
  config.dense_layers = 4;
  EXPECT_EQ(LayerBudgets(config, 4, 100000), std::vector<int64_t>(4, kAllRows));
}

TEST(LayerBudgetsTest, BudgetThatCoversTheZone_IsAll) {
  RetrievalConfig config;
  config.top_k = 100;
  config.dense_layers = 0;
  EXPECT_EQ(LayerBudgets(config, 1, 100), (std::vector<int64_t>{kAllRows}));
  EXPECT_EQ(LayerBudgets(config, 1, 101), (std::vector<int64_t>{100}));
  config.top_k = kAllRows;
  EXPECT_EQ(LayerBudgets(config, 2, 101), (std::vector<int64_t>{kAllRows, kAllRows}));
}

TEST(ParseTest, UnknownWords_AreNamedWithWhatIsKnown) {
  EXPECT_THAT(ParseTopK("0"), StatusIs(absl::StatusCode::kInvalidArgument, "top_k=0 is outside"));
  EXPECT_THAT(ParseTopK("-3"), StatusIs(absl::StatusCode::kInvalidArgument, "top_k=-3"));
  EXPECT_THAT(ParseTopK("many"), StatusIs(absl::StatusCode::kInvalidArgument, "top_k=many"));
  EXPECT_EQ(*ParseTopK("all"), kAllRows);
  EXPECT_EQ(*ParseTopK("12"), 12);
  EXPECT_THAT(ParseWant("row"),
              StatusIs(absl::StatusCode::kInvalidArgument, "rows, values, attend"));
  EXPECT_THAT(ParsePrefetch("on"),
              StatusIs(absl::StatusCode::kInvalidArgument, "off, speculative, verified"));
  EXPECT_THAT(ParseRowMap("tree"), StatusIs(absl::StatusCode::kInvalidArgument, "vector, hash"));
  EXPECT_THAT(ParseBudget("flat"), StatusIs(absl::StatusCode::kInvalidArgument, "uniform, linear"));
}

TEST(ValidateTest, EachFieldOutOfBounds_IsNamed) {
  const auto refused = [](auto change, const char* text) {
    RetrievalConfig config;
    change(config);
    EXPECT_THAT(ValidateRetrievalConfig(config, 8),
                StatusIs(absl::StatusCode::kInvalidArgument, text));
  };
  CARREL_EXPECT_OK(ValidateRetrievalConfig(RetrievalConfig(), 8));
  refused([](auto& c) { c.top_k = 0; }, "top_k=0");
  refused([](auto& c) { c.dense_layers = 9; }, "dense_layers=9 is outside [0, 8]");
  refused([](auto& c) { c.sink = -1; }, "sink=-1");
  refused([](auto& c) { c.local = -1; }, "local=-1");
  refused([](auto& c) { c.oversample = 0.5; }, "oversample=0.5");
  refused([](auto& c) { c.verified_hit_rate = NAN; }, "verified_hit_rate=nan");
  refused([](auto& c) { c.effort = -1; }, "effort=-1");
  refused([](auto& c) { c.row_cache_bytes = 1000; }, "row_cache keeps rows");
  refused([](auto& c) { c.row_cache_bytes = -1; }, "row_cache=-1");
}

TEST(DeviceConfigTest, ZoneInHostMemory_RefusesWhatMakesNoSense) {
  const auto refused = [](auto change, const char* text) {
    DeviceConfig device;
    device.device = model::Device::kCuda;
    device.zone_in_host = true;
    device.bank.bytes = 1000;
    RetrievalConfig config;
    config.selector = *ParseSelector("hash");
    change(device, config);
    EXPECT_THAT(ValidateDeviceConfig(device, config),
                StatusIs(absl::StatusCode::kInvalidArgument, text));
  };
  DeviceConfig device;
  device.device = model::Device::kCuda;
  device.zone_in_host = true;
  RetrievalConfig ahead;
  ahead.selector = *ParseSelector("hash");
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, ahead));
  device.bank = {.bytes = 1000, .map = kernels::RowMap::kHash, .ahead = 2};
  ahead.prefetch = Prefetch::kSpeculative;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, ahead));
  refused([](auto& d, auto&) { d.device = model::Device::kCpu; }, "needs device=cuda");
  refused([](auto& d, auto&) { d.zone_on_device = true; }, "either");
  refused(
      [](auto& d, auto& c) {
        d.zone_in_host = false;
        c.selector.reset();
      },
      "need zone=host");
  refused([](auto&, auto& c) { c.selector.reset(); }, "needs a method");
  refused([](auto&, auto& c) { c.selector = *ParseSelector("hash:bits=96"); }, "bits=96");
  refused(
      [](auto&, auto& c) {
        c.selector = *ParseSelector("hip");
        c.prefetch = Prefetch::kSpeculative;
      },
      "only method=hash");
  refused([](auto&, auto& c) { c.prefetch = Prefetch::kVerified; }, "off or speculative");
  refused([](auto& d, auto&) { d.bank.bytes = -1; }, "bank_bytes=-1");
  refused([](auto& d, auto&) { d.bank.ahead = 2; }, "prefetch is off");
  refused(
      [](auto& d, auto& c) {
        c.prefetch = Prefetch::kSpeculative;
        d.bank.ahead = 9;
      },
      "bank_ahead=9 is outside [1, 8]");
  refused(
      [](auto& d, auto& c) {
        c.prefetch = Prefetch::kSpeculative;
        d.bank.bytes = 0;
      },
      "bank_bytes > 0");
  refused([](auto& d, auto&) { d.bank = {.bytes = 0, .map = kernels::RowMap::kHash}; }, "bank_map");
}

TEST(DeviceConfigTest, BoundsAndWhatDoesNotGoTogether_AreRefused) {
  const auto refused = [](const DeviceConfig& device, const RetrievalConfig& config,
                          absl::string_view name) {
    EXPECT_THAT(ValidateDeviceConfig(device, config),
                StatusIs(absl::StatusCode::kInvalidArgument, std::string(name)));
  };
  DeviceConfig device;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, RetrievalConfig()));
  device.zone_on_device = true;
  RetrievalConfig config;
  config.selector = *ParseSelector("hash");
  refused(device, config, "zone=device needs device=cuda");
  device.device = model::Device::kCuda;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, config));
  refused(device, RetrievalConfig(), "zone=device needs a method");
  config.measure = true;
  refused(device, config, "does not measure");
  device.new_tokens = 0;
  refused(device, RetrievalConfig(), "new_tokens=0");
  device.new_tokens = 1;
  device.gpu_memory = -1;
  refused(device, RetrievalConfig(), "gpu_memory=-1");
  device = DeviceConfig();
  device.device = model::Device::kCuda;
  config = RetrievalConfig();
  config.selector = *ParseSelector("hip");
  refused(device, config, "needs zone=host or zone=device");
  config.prefetch = Prefetch::kSpeculative;
  refused(DeviceConfig(), config, "prefetch must be off");
}

TEST(ValidateTest, ZoneThatTheDecoderHolds_WhatOnlyAStoreOffers_IsRefused) {
  const auto refused = [](auto change, const char* text) {
    RetrievalConfig config;
    config.selector = *ParseSelector("exact");
    CARREL_EXPECT_OK(ValidateRetrievalConfig(config, 8));
    change(config);
    EXPECT_THAT(ValidateRetrievalConfig(config, 8),
                StatusIs(absl::StatusCode::kInvalidArgument, text));
  };
  refused([](auto& c) { c.select = Select::kMass, c.mass = 0.5; }, "top-k only");
  refused([](auto& c) { c.want = Want::kRows; }, "nothing travels");
  refused([](auto& c) { c.effort = 1; }, "effort must be 0");
}

TEST(ValidateCudaSelectorTest, ParametersWithoutACudaForm_AreNamed) {
  const auto refused = [](const char* selector, const char* text) {
    EXPECT_THAT(ValidateCudaSelector(*ParseSelector(selector)),
                StatusIs(absl::StatusCode::kInvalidArgument, text));
  };
  for (const char* served : {"exact", "hip:block_k=4,refresh=8", "infinitehip:preset=flash",
                             "hash:bits=64", "hash:codes=stored", "channels:by=k,share=16"}) {
    CARREL_EXPECT_OK(ValidateCudaSelector(*ParseSelector(served)));
  }
  refused("exact:scan=int8", "method=exact: scan=int8 is not made on a GPU");
  refused("hip:block_q=32", "method=hip: block_q=32 has no CUDA form");
  refused("hip:ensemble=4", "ensemble=4");
  refused("hip:widen=16", "widen=16");
  refused("infinitehip:block_q=2", "method=infinitehip: block_q=2");
  refused("hash:bits=96", "bits=96 has no CUDA form; zone=device serves 64, 128 and 256");
}

TEST(SelectorReadsKeysTest, CodesAndLabels_OnlyWhereTheyOversample) {
  for (const char* selector :
       {"hash", "channels", "hash:oversample=1", "channels:oversample=auto"}) {
    EXPECT_FALSE(SelectorReadsKeys(*ParseSelector(selector))) << selector;
  }
  for (const char* selector : {"exact", "hip", "infinitehip", "hash:oversample=2"}) {
    EXPECT_TRUE(SelectorReadsKeys(*ParseSelector(selector))) << selector;
  }
}

TEST(ValidateTest, TermWithPositionsOfTheirOwn_IsRefused) {
  RetrievalConfig config;
  config.rope = Rope::kInfiniteHip;
  config.selector = *ParseSelector("exact");
  config.dense_layers = 0;
  CARREL_EXPECT_OK(ValidateRetrievalConfig(config, 8));
  config.estimate = Estimate::kOn;
  EXPECT_THAT(ValidateRetrievalConfig(config, 8),
              StatusIs(absl::StatusCode::kInvalidArgument, "estimate=on with rope=infinitehip"));
}

TEST(ValidateTest, PositionsOfTheirOwnOnAGpu_AreThoseOfInfiniteHipAlone) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  RetrievalConfig config;
  config.rope = Rope::kInfiniteHip;
  config.dense_layers = 0;
  config.top_k = 64;
  config.selector = *ParseSelector("infinitehip:stages=2:1x:1");
  DeviceConfig device;
  device.device = model::Device::kCuda;
  EXPECT_THAT(ValidateDeviceConfig(device, config),
              StatusIs(kInvalid, "needs zone=host or zone=device"));
  device.zone_on_device = true;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, config));
  EXPECT_TRUE(NeedsHostRows(config, device));
  config.selector = *ParseSelector("exact");
  EXPECT_THAT(ValidateDeviceConfig(device, config), StatusIs(kInvalid, "method=exact has no CUDA"));
  config.selector = *ParseSelector("infinitehip:block_q=4");
  EXPECT_THAT(ValidateDeviceConfig(device, config), StatusIs(kInvalid, "block_q=4"));
  config.selector = *ParseSelector("infinitehip");
  device.zone_on_device = false;
  device.zone_in_host = true;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, config));
  device.bank.bytes = 1 << 20;
  EXPECT_THAT(ValidateDeviceConfig(device, config), StatusIs(kInvalid, "bank_bytes must be 0"));
}

TEST(ValidateTest, MaskPerQHead_IsForAZoneOnTheCpuWithANumberOfRows) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  RetrievalConfig config;
  config.top_k = 64;
  config.selector = *ParseSelector("hip:mask=q-head");
  CARREL_EXPECT_OK(ValidateRetrievalConfig(config, 8));
  EXPECT_FALSE(Estimates(config, /*has_summaries=*/true));
  DeviceConfig device;
  device.device = model::Device::kCuda;
  device.zone_on_device = true;
  EXPECT_THAT(ValidateDeviceConfig(device, config), StatusIs(kInvalid, "mask=q-head has no CUDA"));
  config.estimate = Estimate::kOn;
  EXPECT_THAT(ValidateRetrievalConfig(config, 8),
              StatusIs(kInvalid, "estimate=on with mask=q-head"));
  config.estimate = Estimate::kAuto;
  config.rope = Rope::kInfiniteHip;
  EXPECT_THAT(ValidateRetrievalConfig(config, 8), StatusIs(kInvalid, "share positions"));
  config.rope = Rope::kTrained;
  config.select = Select::kFidelity;
  config.target_error = 0.1;
  EXPECT_THAT(ValidateRetrievalConfig(config, 8), StatusIs(kInvalid, "needs --top-k"));
}

TEST(TakesHostRowsTest, OnTheGpu_ForTheTermOrAZoneInHostMemory) {
  RetrievalConfig config;
  config.selector = *ParseSelector("hash");
  DeviceConfig there, in_host;
  there.device = in_host.device = model::Device::kCuda;
  there.zone_on_device = in_host.zone_in_host = true;
  EXPECT_TRUE(TakesHostRows(config, there));
  EXPECT_TRUE(TakesHostRows(config, in_host));
  config.estimate = Estimate::kOff;
  EXPECT_FALSE(TakesHostRows(config, there));
  EXPECT_TRUE(TakesHostRows(config, in_host));
}

TEST(NeedsHostRowsTest, OnTheGpu_OnlyWhatIsCalibratedByThem) {
  DeviceConfig here, there;
  there.device = model::Device::kCuda;
  there.zone_on_device = true;
  RetrievalConfig config;
  EXPECT_FALSE(NeedsHostRows(config, here));
  for (const char* selector : {"exact", "hip", "infinitehip", "hash"}) {
    config.selector = *ParseSelector(selector);
    EXPECT_TRUE(NeedsHostRows(config, here)) << selector;
    EXPECT_FALSE(NeedsHostRows(config, there)) << selector;
  }
  for (const char* selector : {"hash:codes=stored", "channels"}) {
    config.selector = *ParseSelector(selector);
    EXPECT_TRUE(NeedsHostRows(config, there)) << selector;
  }
}

}  // namespace
}  // namespace carrel::decoder
