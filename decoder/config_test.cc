#include "decoder/config.h"

#include <numeric>

#include "common/test_util.h"
#include "decoder/select/method_type.h"

namespace carrel::decoder {
namespace {

std::vector<int64_t> BudgetsOf(const RetrievalConfig& config, int32_t layers, int64_t zone_rows) {
  return Budgets(LayerSelections(config, layers, zone_rows));
}

TEST(LayerSelectionsTest, Uniform_GivesEachSparseLayerTheSame) {
  RetrievalConfig config;
  config.selection = select::TopK{100};
  config.dense_layers = 2;
  EXPECT_EQ(BudgetsOf(config, 5, 1000), (std::vector<int64_t>{kAllRows, kAllRows, 100, 100, 100}));
}

TEST(LayerSelectionsTest, Linear_RisesWithTheSameTotal) {
  RetrievalConfig config;
  config.selection = select::TopK{128};
  config.dense_layers = 2;
  config.budget = Budget::kLinear;
  const std::vector<int64_t> budgets = BudgetsOf(config, 34, 100000);
  EXPECT_EQ(budgets[2], 64);
  EXPECT_EQ(budgets[33], 192);
  EXPECT_TRUE(std::is_sorted(budgets.begin() + 2, budgets.end()));
  EXPECT_NEAR(std::accumulate(budgets.begin() + 2, budgets.end(), 0.0), 128.0 * 32, 16);
}

TEST(LayerSelectionsTest, Measured_GivesMoreWhereAttentionIsPeaked) {
  RetrievalConfig config;
  config.selection = select::TopK{100};
  config.dense_layers = 1;
  config.budget = Budget::kMeasured;
  config.layer_entropy_nats = {9, 6, 3, 3};
  EXPECT_EQ(BudgetsOf(config, 4, 100000), (std::vector<int64_t>{kAllRows, 57, 121, 121}));
  EXPECT_EQ(BudgetsOf(config, 4, 120), (std::vector<int64_t>{kAllRows, 57, kAllRows, kAllRows}));
  config.layer_entropy_nats = {0, 0, 0, 0};
  EXPECT_EQ(BudgetsOf(config, 4, 100000), (std::vector<int64_t>{kAllRows, 100, 100, 100}));
  config.dense_layers = 4;
  EXPECT_EQ(BudgetsOf(config, 4, 100000), std::vector<int64_t>(4, kAllRows));
}

TEST(LayerSelectionsTest, BudgetThatCoversTheZone_IsAll) {
  RetrievalConfig config;
  config.selection = select::TopK{100};
  config.dense_layers = 0;
  EXPECT_EQ(BudgetsOf(config, 1, 100), (std::vector<int64_t>{kAllRows}));
  EXPECT_EQ(BudgetsOf(config, 1, 101), (std::vector<int64_t>{100}));
  config.selection = select::All();
  EXPECT_EQ(BudgetsOf(config, 2, 101), (std::vector<int64_t>{kAllRows, kAllRows}));
}

TEST(LayerSelectionsTest, RowsOfHeads_AreOfLayersThatAreNotDenseAndDoNotCoverTheZone) {
  RetrievalConfig config;
  config.dense_layers = 1;
  const AttentionShape shape{.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 8};
  const std::vector<select::Selection> selections =
      LayerSelections(config, {0, 0, 5, 9, 100, 3}, shape, 100);
  EXPECT_EQ(selections, (std::vector<select::Selection>{select::All(), select::TopK{9, {5, 9}},
                                                        select::All()}));
}

TEST(ParseTest, UnknownWords_AreNamedWithWhatIsKnown) {
  EXPECT_THAT(ParseTopK("0"),
              StatusIs(absl::StatusCode::kInvalidArgument, "top_k=0 is less than 1"));
  EXPECT_THAT(ParseTopK("many"), StatusIs(absl::StatusCode::kInvalidArgument, "top_k=many"));
  EXPECT_EQ(*ParseTopK("all"), select::Selection(select::All()));
  EXPECT_EQ(*ParseTopK("12"), select::Selection(select::TopK{12}));
  EXPECT_EQ(*ParseSelection("top-k:12"), select::Selection(select::TopK{12}));
  EXPECT_EQ(*ParseSelection("mass:0.5"), select::Selection(select::Mass{0.5f}));
  EXPECT_EQ(*ParseSelection("range:4"), select::Selection(select::Range{4}));
  EXPECT_THAT(ParseSelection("mass:half"),
              StatusIs(absl::StatusCode::kInvalidArgument, "select=mass:half"));
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
  refused([](auto& c) { c.selection = select::TopK{0}; }, "top_k=0 is less than 1");
  refused([](auto& c) { c.selection = select::TopK{-3}; }, "top_k=-3");
  refused([](auto& c) { c.selection = FidelityOptions{0}; }, "target_error=0 is outside");
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
    RetrievalConfig config;
    HostZoneOptions zone{*ParseSelector("hash"), {.bytes = 1000}};
    change(device, config, zone);
    config.zone = zone;
    EXPECT_THAT(ValidateDeviceConfig(device, config),
                StatusIs(absl::StatusCode::kInvalidArgument, text));
  };
  DeviceConfig device;
  device.device = model::Device::kCuda;
  RetrievalConfig ahead;
  ahead.zone = HostZoneOptions{*ParseSelector("hash")};
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, ahead));
  ahead.zone = HostZoneOptions{*ParseSelector("hash"),
                               {.bytes = 1000, .map = kernels::RowMap::kHash, .ahead = 2}};
  ahead.prefetch = Prefetch::kSpeculative;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, ahead));
  refused([](auto& d, auto&, auto&) { d.device = model::Device::kCpu; },
          "need zone=host and device=cuda");
  refused([](auto&, auto&, auto& z) { z.selector = *ParseSelector("hash:bits=96"); }, "bits=96");
  refused(
      [](auto&, auto& c, auto& z) {
        z.selector = *ParseSelector("hip");
        c.prefetch = Prefetch::kSpeculative;
      },
      "only method=hash");
  refused([](auto&, auto& c, auto&) { c.prefetch = Prefetch::kVerified; }, "off or speculative");
  refused([](auto&, auto&, auto& z) { z.bank.bytes = -1; }, "bank_bytes=-1");
  refused([](auto&, auto&, auto& z) { z.bank.ahead = 2; }, "prefetch is off");
  refused(
      [](auto&, auto& c, auto& z) {
        c.prefetch = Prefetch::kSpeculative;
        z.bank.ahead = 9;
      },
      "bank_ahead=9 is outside [1, 8]");
  refused(
      [](auto&, auto& c, auto& z) {
        c.prefetch = Prefetch::kSpeculative;
        z.bank.bytes = 0;
      },
      "bank_bytes > 0");
  refused([](auto&, auto&, auto& z) { z.bank = {.bytes = 0, .map = kernels::RowMap::kHash}; },
          "bank_map");
}

TEST(DeviceConfigTest, BoundsAndWhatDoesNotGoTogether_AreRefused) {
  const auto refused = [](const DeviceConfig& device, const RetrievalConfig& config,
                          absl::string_view name) {
    EXPECT_THAT(ValidateDeviceConfig(device, config),
                StatusIs(absl::StatusCode::kInvalidArgument, std::string(name)));
  };
  DeviceConfig device;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, RetrievalConfig()));
  RetrievalConfig config;
  config.zone = DeviceZoneOptions{*ParseSelector("hash")};
  refused(device, config, "zone=device needs device=cuda");
  device.device = model::Device::kCuda;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, config));
  config.measure = true;
  refused(device, config, "does not measure");
  device.new_tokens = 0;
  refused(device, RetrievalConfig(), "new_tokens=0");
  device.new_tokens = 1;
  device.gpu_memory = -1;
  refused(device, RetrievalConfig(), "gpu_memory=-1");
  config = RetrievalConfig();
  config.zone = HostZoneOptions{*ParseSelector("hip")};
  config.prefetch = Prefetch::kSpeculative;
  refused(DeviceConfig(), config, "prefetch must be off");
}

TEST(ValidateTest, ZoneThatTheDecoderHolds_WhatOnlyAStoreOffers_IsRefused) {
  const auto refused = [](auto change, const char* text) {
    RetrievalConfig config;
    config.zone = HostZoneOptions{*ParseSelector("exact")};
    CARREL_EXPECT_OK(ValidateRetrievalConfig(config, 8));
    change(config);
    EXPECT_THAT(ValidateRetrievalConfig(config, 8),
                StatusIs(absl::StatusCode::kInvalidArgument, text));
  };
  refused([](auto& c) { c.selection = select::Mass{0.5f}; }, "top-k only");
  refused([](auto& c) { c.want = Want::kRows; }, "nothing travels");
  refused([](auto& c) { c.effort = 1; }, "effort must be 0");
}

TEST(ValidateCudaSelectorTest, ParametersWithoutACudaForm_AreNamed) {
  const auto refused = [](const char* selector, const char* text) {
    EXPECT_THAT(MethodOf(*ParseSelector(selector)).ValidateCuda(*ParseSelector(selector)),
                StatusIs(absl::StatusCode::kInvalidArgument, text));
  };
  for (const char* served : {"exact", "hip:block_k=4,refresh=8", "infinitehip:preset=flash",
                             "hash:bits=64", "hash:codes=stored", "channels:by=k,share=16"}) {
    CARREL_EXPECT_OK(MethodOf(*ParseSelector(served)).ValidateCuda(*ParseSelector(served)));
  }
  refused("hip:block_q=32", "method=hip: block_q=32 has no CUDA form");
  refused("hip:ensemble=4", "ensemble=4");
  refused("hip:widen=16", "widen=16");
  refused("infinitehip:block_q=2", "method=infinitehip: block_q=2");
  refused("hash:bits=96", "bits=96 has no CUDA form; zone=device serves 64, 128 and 256");
}

TEST(SelectorReadsKeysTest, CodesAndLabels_OnlyWhereTheyOversample) {
  for (const char* selector : {"hash:oversample=1", "channels:oversample=1"}) {
    EXPECT_FALSE(MethodOf(*ParseSelector(selector)).reads_keys(*ParseSelector(selector)))
        << selector;
  }
  for (const char* selector : {"exact", "hip", "infinitehip", "hash", "channels",
                               "hash:oversample=2", "channels:oversample=auto"}) {
    EXPECT_TRUE(MethodOf(*ParseSelector(selector)).reads_keys(*ParseSelector(selector)))
        << selector;
  }
}

TEST(ValidateTest, TermWithPositionsOfTheirOwn_IsRefused) {
  RetrievalConfig config;
  config.rope = Rope::kInfiniteHip;
  config.zone = HostZoneOptions{*ParseSelector("exact")};
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
  config.selection = select::TopK{64};
  config.zone = DeviceZoneOptions{*ParseSelector("infinitehip:stages=2:1x:1")};
  DeviceConfig device;
  device.device = model::Device::kCuda;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, config));
  EXPECT_TRUE(NeedsHostRows(config, device));
  config.zone = DeviceZoneOptions{*ParseSelector("exact")};
  EXPECT_THAT(ValidateDeviceConfig(device, config), StatusIs(kInvalid, "method=exact has no CUDA"));
  config.zone = DeviceZoneOptions{*ParseSelector("infinitehip:block_q=4")};
  EXPECT_THAT(ValidateDeviceConfig(device, config), StatusIs(kInvalid, "block_q=4"));
  config.zone = HostZoneOptions{*ParseSelector("infinitehip")};
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, config));
  std::get<HostZoneOptions>(config.zone).bank.bytes = 1 << 20;
  EXPECT_THAT(ValidateDeviceConfig(device, config), StatusIs(kInvalid, "bank_bytes must be 0"));
}

TEST(ValidateTest, MaskPerQHead_IsForAZoneOnTheCpuWithANumberOfRows) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  RetrievalConfig config;
  config.selection = select::TopK{64};
  config.zone = DeviceZoneOptions{*ParseSelector("hip:mask=q-head")};
  CARREL_EXPECT_OK(ValidateRetrievalConfig(config, 8));
  EXPECT_FALSE(Estimates(config, /*has_summaries=*/true));
  DeviceConfig device;
  device.device = model::Device::kCuda;
  EXPECT_THAT(ValidateDeviceConfig(device, config), StatusIs(kInvalid, "mask=q-head has no CUDA"));
  config.estimate = Estimate::kOn;
  EXPECT_THAT(ValidateRetrievalConfig(config, 8),
              StatusIs(kInvalid, "estimate=on with mask=q-head"));
  config.estimate = Estimate::kAuto;
  config.rope = Rope::kInfiniteHip;
  EXPECT_THAT(ValidateRetrievalConfig(config, 8), StatusIs(kInvalid, "share positions"));
  config.rope = Rope::kTrained;
  config.selection = FidelityOptions{0.1};
  EXPECT_THAT(ValidateRetrievalConfig(config, 8), StatusIs(kInvalid, "needs --top-k"));
}

TEST(PromptTakesAllTest, ByDefaultWhereAGpuHoldsTheRows) {
  RetrievalConfig at_store, in_host, on_device;
  in_host.zone = HostZoneOptions{*ParseSelector("exact")};
  on_device.zone = DeviceZoneOptions{*ParseSelector("exact")};
  DeviceConfig cpu, gpu;
  gpu.device = model::Device::kCuda;
  EXPECT_FALSE(PromptTakesAll(at_store, cpu));
  EXPECT_FALSE(PromptTakesAll(in_host, cpu));
  EXPECT_FALSE(PromptTakesAll(in_host, gpu));
  EXPECT_TRUE(PromptTakesAll(on_device, gpu));
  on_device.prompt_rows = PromptRows::kChosen;
  EXPECT_FALSE(PromptTakesAll(on_device, gpu));
  for (RetrievalConfig* config : {&at_store, &in_host, &on_device}) {
    config->prompt_rows = PromptRows::kAll;
    EXPECT_TRUE(PromptTakesAll(*config, gpu));
  }
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument, "prompt_rows=all");
  EXPECT_THAT(ValidateDeviceConfig(cpu, at_store), refused);
  EXPECT_THAT(ValidateDeviceConfig(gpu, in_host), refused);
  CARREL_EXPECT_OK(ValidateDeviceConfig(cpu, in_host));
  CARREL_EXPECT_OK(ValidateDeviceConfig(gpu, on_device));
  in_host.rope = Rope::kInfiniteHip;
  EXPECT_THAT(ValidateDeviceConfig(cpu, in_host), refused);
}

TEST(TakesHostRowsTest, OnTheGpu_ForTheTermOrAZoneInHostMemory) {
  RetrievalConfig there, in_host;
  there.zone = DeviceZoneOptions{*ParseSelector("hash")};
  in_host.zone = HostZoneOptions{*ParseSelector("hash")};
  DeviceConfig device;
  device.device = model::Device::kCuda;
  EXPECT_TRUE(TakesHostRows(there, device));
  EXPECT_TRUE(TakesHostRows(in_host, device));
  there.estimate = in_host.estimate = Estimate::kOff;
  EXPECT_FALSE(TakesHostRows(there, device));
  EXPECT_TRUE(TakesHostRows(in_host, device));
}

TEST(NeedsHostRowsTest, OnTheGpu_OnlyWhatIsCalibratedByThem) {
  DeviceConfig cpu, gpu;
  gpu.device = model::Device::kCuda;
  RetrievalConfig here, there;
  EXPECT_FALSE(NeedsHostRows(here, cpu));
  for (const char* selector : {"exact", "hip", "infinitehip", "hash"}) {
    here.zone = HostZoneOptions{*ParseSelector(selector)};
    there.zone = DeviceZoneOptions{*ParseSelector(selector)};
    // A session looks through them.
    EXPECT_EQ(ScansHere(here, cpu), std::string(selector) == "exact");
    EXPECT_EQ(NeedsHostRows(here, cpu), !ScansHere(here, cpu)) << selector;
    EXPECT_EQ(TakesHostRows(here, cpu), !ScansHere(here, cpu)) << selector;
    EXPECT_FALSE(ScansHere(here, gpu) || ScansHere(there, gpu));
    EXPECT_FALSE(NeedsHostRows(here, gpu)) << selector;
    EXPECT_FALSE(NeedsHostRows(there, gpu)) << selector;
  }
  here.zone = HostZoneOptions{*ParseSelector("exact")};
  here.rope = Rope::kInfiniteHip;
  EXPECT_TRUE(NeedsHostRows(here, cpu));
  for (const char* selector : {"hash:codes=stored", "channels"}) {
    there.zone = DeviceZoneOptions{*ParseSelector(selector)};
    EXPECT_TRUE(NeedsHostRows(there, gpu)) << selector;
  }
}

}  // namespace
}  // namespace carrel::decoder
