#include "common/byte_budget.h"

#include <memory>
#include <vector>

#include "common/test_util.h"

namespace carrel {
namespace {

using absl::StatusCode;

constexpr int64_t kMi = int64_t{1} << 20;

TEST(ByteBudgetTest, OneSession_GetsHalfOfWhatIsShared) {
  ByteBudget budget(64 * kMi);
  const auto account = std::make_shared<ByteBudget::Account>(&budget);
  {
    const auto charge = account->Take("query", 16 * kMi);
    CARREL_ASSERT_OK(charge);
    EXPECT_EQ(budget.used_bytes(), 16 * kMi);
    EXPECT_THAT(account->Take("query", 1).status(),
                StatusIs(StatusCode::kResourceExhausted, "request_budget_bytes=67108864"));
    EXPECT_EQ(budget.refused(), 1);
  }
  EXPECT_EQ(budget.used_bytes(), 0);
  CARREL_EXPECT_OK(account->Take("query", 16 * kMi).status());
  EXPECT_THAT(account->Take("query", -1).status(), StatusIs(StatusCode::kResourceExhausted, "-1"));
}

TEST(ByteBudgetTest, ManyThatTakeAllTheyGet_LeaveASmallRequestToEveryone) {
  ByteBudget budget(64 * kMi);
  std::vector<std::shared_ptr<ByteBudget::Account>> accounts;
  std::vector<ByteBudget::Charge> charges;
  constexpr int kSessions = 500;
  for (int i = 0; i < kSessions; ++i) {
    accounts.push_back(std::make_shared<ByteBudget::Account>(&budget));
  }
  for (const auto& account : accounts) {
    for (int64_t bytes = 32 * kMi; bytes >= 1024; bytes /= 2) {
      auto charge = account->Take("query", bytes);
      if (charge.ok()) charges.push_back(*std::move(charge));
    }
  }
  EXPECT_LE(budget.used_bytes(), budget.limit_bytes());
  const auto late = std::make_shared<ByteBudget::Account>(&budget);
  CARREL_EXPECT_OK(late->Take("query", 16 * kMi / (kSessions + 1)).status());
}

TEST(ByteBudgetTest, Parts_ShrinkAsMoreWaitAndStayWithinTheirShare) {
  ByteBudget budget(64 * kMi);
  EXPECT_EQ(budget.PartBytes(4096), 4096);
  EXPECT_EQ(budget.PartBytes(kMi), 16 * kMi / 32);
  std::vector<ByteBudget::Charge> parts;
  for (int i = 0; i < 1000; ++i) parts.push_back(budget.TakePart(budget.PartBytes(kMi)));
  EXPECT_EQ(budget.PartBytes(kMi), ByteBudget::kLeastPartBytes);
  EXPECT_LE(budget.part_bytes(), 16 * kMi + 1000 * ByteBudget::kLeastPartBytes);
  parts.clear();
  EXPECT_EQ(budget.part_bytes(), 0);
}

TEST(ByteBudgetTest, AMovedCharge_IsGivenBackOnce) {
  ByteBudget budget(64 * kMi);
  const auto account = std::make_shared<ByteBudget::Account>(&budget);
  ByteBudget::Charge outer;
  {
    auto charge = account->Take("query", 1000);
    CARREL_ASSERT_OK(charge);
    outer = *std::move(charge);
  }
  EXPECT_EQ(budget.used_bytes(), 1000);
  outer = ByteBudget::Charge();
  EXPECT_EQ(budget.used_bytes(), 0);
}

}  // namespace
}  // namespace carrel
