#include "decoder/fidelity.h"

#include <cmath>
#include <random>

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

using absl::StatusCode;

HeadErrors Falling(double at_first, double power) {
  HeadErrors head;
  head.output = 2;
  for (int64_t rows = 8; rows <= 4096; rows *= 2) {
    head.rows.push_back(rows);
    head.error.push_back(at_first * std::pow(static_cast<double>(rows) / 8, -power));
  }
  return head;
}

// What a plan of measured numbers of rows leaves.
double ErrorOf(const std::vector<HeadErrors>& heads, const std::vector<int64_t>& rows) {
  double sum = 0;
  for (size_t i = 0; i < heads.size(); ++i) {
    for (size_t j = 0; j < heads[i].rows.size(); ++j) {
      if (heads[i].rows[j] == rows[i]) sum += heads[i].error[j] / heads[i].output;
    }
  }
  return std::sqrt(sum / static_cast<double>(heads.size()));
}

TEST(PlanRowsTest, ReachesTheTargetWithFewerRowsThanTheSameForAll) {
  std::mt19937_64 random(TestSeed());
  std::uniform_real_distribution<double> first(0.001, 1), power(0.4, 2);
  std::vector<HeadErrors> heads;
  for (int i = 0; i < 60; ++i) heads.push_back(Falling(first(random), power(random)));
  for (const int64_t same : {32, 128, 512}) {
    const double target = ErrorOf(heads, std::vector<int64_t>(heads.size(), same));
    const RowPlan plan = PlanRows(heads, 0, 1 << 20, target);
    EXPECT_LE(plan.error, target);
    EXPECT_GT(plan.error, 0.9 * target);
    int64_t total = 0;
    for (const int64_t rows : plan.rows) total += rows;
    EXPECT_LT(total, 60 * same);
  }
}

TEST(PlanRowsTest, FinerTarget_TakesMoreRowsAndMoreForWorseHeads) {
  const std::vector<HeadErrors> heads = {Falling(0.5, 1), Falling(0.005, 1)};
  int64_t before = 0;
  for (const double target : {0.3, 0.1, 0.03}) {
    const RowPlan plan = PlanRows(heads, 0, 1 << 20, target);
    EXPECT_GT(plan.rows[0], plan.rows[1]);
    EXPECT_GT(plan.rows[0], before);
    before = plan.rows[0];
  }
}

TEST(PlanRowsTest, TargetOutOfReach_TakesTheMostMeasuredAndSaysWhatTheyLeave) {
  const std::vector<HeadErrors> heads = {Falling(1, 0.1), Falling(1, 0.1)};
  const RowPlan plan = PlanRows(heads, 0, 1 << 20, 1e-6);
  EXPECT_EQ(plan.rows, (std::vector<int64_t>{4096, 4096}));
  EXPECT_NEAR(plan.error, ErrorOf(heads, plan.rows), 1e-9);
}

TEST(PlanRowsTest, ShortZone_AllOfItLeavesNothing) {
  const std::vector<HeadErrors> heads = {Falling(1, 0.1)};
  const RowPlan plan = PlanRows(heads, 0, 100, 1e-6);
  EXPECT_EQ(plan.rows, std::vector<int64_t>{100});
  EXPECT_EQ(plan.error, 0);
}

TEST(PlanRowsTest, HeadsOfDenseLayersAreLeftOut) {
  const std::vector<HeadErrors> heads = {Falling(1, 1), Falling(1, 1), Falling(1, 1)};
  const RowPlan plan = PlanRows(heads, 2, 1 << 20, 0.2);
  EXPECT_EQ(plan.rows[0], 0);
  EXPECT_EQ(plan.rows[1], 0);
  EXPECT_GT(plan.rows[2], 0);
}

retrieval::ContextFacts Measured() {
  retrieval::ContextFacts context;
  context.name = "doc";
  context.shape = {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 8};
  for (int64_t i = 0; i < 4; ++i) {
    context.fidelity.push_back({.layer = i / 2,
                                .kv_head = i % 2,
                                .output = static_cast<double>(1 + i),
                                .rows = {8, 16},
                                .error = {0.5, 0.25},
                                .error_without = {1, 0.75}});
  }
  return context;
}

TEST(ErrorsOfTest, OutputsAreTheirLayersMean) {
  const std::vector<HeadErrors> heads = *ErrorsOf(Measured(), true);
  ASSERT_EQ(heads.size(), 4u);
  EXPECT_EQ(heads[0].output, 1.5);
  EXPECT_EQ(heads[3].output, 3.5);
  EXPECT_EQ(heads[2].error, (std::vector<double>{0.5, 0.25}));
  EXPECT_EQ((*ErrorsOf(Measured(), false))[2].error, (std::vector<double>{1, 0.75}));
}

TEST(ErrorsOfTest, NotMeasured_SaysWhatToDo) {
  retrieval::ContextFacts context = Measured();
  context.fidelity.clear();
  EXPECT_THAT(ErrorsOf(context, true),
              StatusIs(StatusCode::kFailedPrecondition,
                       "context doc was not measured: how many rows reach a fidelity is not known; "
                       "carrel reindex doc --as NEW measures it"));
}

TEST(ErrorsOfTest, NotWhole_IsDataLossThatNamesTheHead) {
  retrieval::ContextFacts context = Measured();
  context.fidelity[3].error[1] = -1;
  EXPECT_THAT(ErrorsOf(context, true), StatusIs(StatusCode::kDataLoss, "layer 1 kv_head 1"));
  context = Measured();
  context.fidelity[1].rows[1] = 8;
  EXPECT_THAT(ErrorsOf(context, true), StatusIs(StatusCode::kDataLoss, "layer 0 kv_head 1"));
  context = Measured();
  context.fidelity.pop_back();
  EXPECT_THAT(ErrorsOf(context, true), StatusIs(StatusCode::kDataLoss, "3 heads instead of 4"));
}

TEST(ParseFidelityTest, NamesAndOthers) {
  EXPECT_LT(TargetError(*ParseFidelity("faithful")), TargetError(*ParseFidelity("balanced")));
  EXPECT_LT(TargetError(*ParseFidelity("balanced")), TargetError(*ParseFidelity("fast")));
  EXPECT_THAT(ParseFidelity("best"), StatusIs(StatusCode::kInvalidArgument,
                                              "fidelity=best is none of fast, balanced, faithful"));
}

}  // namespace
}  // namespace carrel::decoder
