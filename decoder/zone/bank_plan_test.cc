#include "decoder/zone/bank_plan.h"

#include <random>

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

using kernels::RowMap;

constexpr AttentionShape kShape{.layers = 6, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
constexpr int64_t kRows = 5000;

RetrievalConfig TopK(int64_t top_k, int32_t dense_layers) {
  RetrievalConfig config;
  config.selection = select::TopK{top_k};
  config.dense_layers = dense_layers;
  return config;
}

absl::StatusOr<BankPlan> Plan(const RetrievalConfig& config, const BankConfig& bank) {
  return PlanBanks(LayerSelections(config, kShape.layers, kRows), config.prefetch, bank, kShape,
                   kRows);
}

int64_t Total(const BankPlan& plan, RowMap map) {
  int64_t bytes = 0;
  for (const int64_t slots : plan.slots) bytes += BankBytes(kShape, map, plan.rows, slots);
  return bytes;
}

TEST(BankPlanTest, NoBytes_NoBanks) {
  const auto plan = Plan(TopK(100, 2), BankConfig());
  CARREL_ASSERT_OK(plan);
  EXPECT_EQ(plan->attended, (std::vector<int64_t>{kRows, kRows, 100, 100, 100, 100}));
  EXPECT_EQ(plan->slots, std::vector<int64_t>(6, 0));
}

TEST(BankPlanTest, AnyBytes_AreUsedAndNotExceeded) {
  std::mt19937_64 rng(TestSeed());
  for (int trial = 0; trial < 200; ++trial) {
    const RowMap map = trial % 2 == 0 ? RowMap::kVector : RowMap::kHash;
    RetrievalConfig config = TopK(1 + static_cast<int64_t>(rng() % 300), trial % 4);
    if (trial % 3 == 0) config.prefetch = Prefetch::kSpeculative;
    if (trial % 5 == 0) config.budget = Budget::kLinear;
    const BankConfig bank{.bytes = 1 + static_cast<int64_t>(rng() % 20'000'000),
                          .map = map,
                          .ahead = config.prefetch == Prefetch::kOff ? 1.0 : 2.0};
    const auto plan = Plan(config, bank);
    if (!plan.ok()) {
      EXPECT_THAT(plan, StatusIs(absl::StatusCode::kInvalidArgument, "at least"));
      continue;
    }
    EXPECT_LE(Total(*plan, map), bank.bytes);
    for (size_t l = 0; l < 6; ++l) {
      if (!plan->chooses(l)) {
        EXPECT_TRUE(plan->slots[l] == 0 || plan->holds_all(l));
        continue;
      }
      EXPECT_GE(plan->slots[l], plan->attended[l]);
      EXPECT_LE(plan->slots[l], kRows);
      EXPECT_GE(plan->slots[l], plan->ahead[l]);
      EXPECT_EQ(plan->ahead[l] > 0,
                config.prefetch != Prefetch::kOff && l > 0 && !plan->holds_all(l));
    }
  }
}

TEST(BankPlanTest, LeastBytes_AreNamedAndEnough) {
  for (const RowMap map : {RowMap::kVector, RowMap::kHash}) {
    const int64_t least = 4 * BankBytes(kShape, map, kRows, 100);
    EXPECT_THAT(
        Plan(TopK(100, 2), {.bytes = least - 1, .map = map}),
        StatusIs(absl::StatusCode::kInvalidArgument, std::to_string(least) + " bytes are needed"));
    const auto plan = Plan(TopK(100, 2), {.bytes = least, .map = map});
    CARREL_ASSERT_OK(plan);
    EXPECT_EQ(plan->slots, (std::vector<int64_t>{0, 0, 100, 100, 100, 100}));
  }
}

TEST(BankPlanTest, DenseLayers_ComeFirst) {
  const int64_t all = BankBytes(kShape, RowMap::kHash, kRows, kRows);
  const int64_t least = 4 * BankBytes(kShape, RowMap::kHash, kRows, 100);
  const auto one = Plan(TopK(100, 2), {.bytes = least + all + 1000, .map = RowMap::kHash});
  CARREL_ASSERT_OK(one);
  EXPECT_EQ(one->slots[0], kRows);
  EXPECT_EQ(one->slots[1], 0);
  const auto everything = Plan(TopK(100, 2), {.bytes = 6 * all});
  CARREL_ASSERT_OK(everything);
  EXPECT_EQ(everything->slots, std::vector<int64_t>(6, kRows));
}

}  // namespace
}  // namespace carrel::decoder
