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
  refused(device, RetrievalConfig(), "zone=device needs device=cuda");
  device.device = model::Device::kCuda;
  CARREL_EXPECT_OK(ValidateDeviceConfig(device, RetrievalConfig()));
  RetrievalConfig config;
  config.prefetch = Prefetch::kSpeculative;
  refused(device, config, "prefetch");
  config = RetrievalConfig();
  config.select = Select::kMass;
  refused(device, config, "top-k");
  config = RetrievalConfig();
  config.estimate = Estimate::kOn;
  refused(device, config, "estimates");
  device.new_tokens = 0;
  refused(device, RetrievalConfig(), "new_tokens=0");
  device.new_tokens = 1;
  device.gpu_memory = -1;
  refused(device, RetrievalConfig(), "gpu_memory=-1");
}

}  // namespace
}  // namespace carrel::decoder
