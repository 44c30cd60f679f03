#include "kernels/rows/row_bank/row_bank.h"

#include <algorithm>
#include <random>

#include "common/test_util.h"

namespace carrel::kernels {
namespace {

std::vector<int32_t> Draw(std::mt19937_64& rng, int64_t rows, int64_t count) {
  std::vector<int32_t> all(static_cast<size_t>(rows)), drawn;
  for (int64_t i = 0; i < rows; ++i) all[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  std::sample(all.begin(), all.end(), std::back_inserter(drawn), count, rng);
  std::shuffle(drawn.begin(), drawn.end(), rng);
  return drawn;
}

TEST(RowBankTest, AnyUses_HoldsTheRowsNamedLast) {
  std::mt19937_64 rng(TestSeed());
  for (int trial = 0; trial < 40; ++trial) {
    const int64_t slots = 1 + static_cast<int64_t>(rng() % 40);
    const int64_t rows = slots + static_cast<int64_t>(rng() % 80);
    RefRowBank bank(slots);
    std::vector<int32_t> history;  // rows, the one named last at the back, none twice
    std::vector<int32_t> row_in(static_cast<size_t>(slots), -1);
    for (int step = 0; step < 30; ++step) {
      const std::vector<int32_t> ids =
          Draw(rng, rows, static_cast<int64_t>(rng() % static_cast<uint64_t>(slots + 1)));
      const size_t kept = std::min(history.size(), static_cast<size_t>(slots));
      const RowBankUse use = bank.Use(ids);
      ASSERT_EQ(use.slots.size(), ids.size());
      size_t next_miss = 0;
      for (size_t i = 0; i < ids.size(); ++i) {
        const bool held = std::find(history.end() - static_cast<int64_t>(kept), history.end(),
                                    ids[i]) != history.end();
        const bool missed =
            next_miss < use.misses.size() && use.misses[next_miss] == static_cast<int32_t>(i);
        ASSERT_EQ(held, !missed) << "row " << ids[i] << " at step " << step;
        next_miss += missed;
        const auto slot = static_cast<size_t>(use.slots[i]);
        ASSERT_LT(slot, row_in.size());
        if (held) {
          ASSERT_EQ(row_in[slot], ids[i]);
        }
        row_in[slot] = ids[i];
      }
      for (size_t i = 0; i < ids.size(); ++i)
        ASSERT_EQ(row_in[static_cast<size_t>(use.slots[i])], ids[i]) << "a slot was given twice";
      for (const int32_t id : ids) {
        history.erase(std::remove(history.begin(), history.end(), id), history.end());
        history.push_back(id);
      }
    }
  }
}

TEST(RowBankTest, LinkedList_EqualsReference) {
  std::mt19937_64 rng(TestSeed());
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t slots = 1 + static_cast<int64_t>(rng() % 60);
    const int64_t rows = slots + static_cast<int64_t>(rng() % 100);
    RefRowBank reference(slots);
    RowBank bank(slots);
    for (int step = 0; step < 40; ++step) {
      const std::vector<int32_t> ids =
          Draw(rng, rows, static_cast<int64_t>(rng() % static_cast<uint64_t>(slots + 1)));
      const RowBankUse expected = reference.Use(ids), use = bank.Use(ids);
      ASSERT_EQ(use.slots, expected.slots);
      ASSERT_EQ(use.misses, expected.misses);
      for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(bank.Find(ids[i]), use.slots[i]);
    }
  }
}

TEST(RowBankTest, SlotForEveryRow_MissesOncePerRow) {
  std::mt19937_64 rng(TestSeed());
  RefRowBank bank(50);
  std::vector<bool> seen(50, false);
  for (int step = 0; step < 40; ++step) {
    const std::vector<int32_t> ids = Draw(rng, 50, 20);
    std::vector<int32_t> expected;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!seen[static_cast<size_t>(ids[i])]) expected.push_back(static_cast<int32_t>(i));
      seen[static_cast<size_t>(ids[i])] = true;
    }
    ASSERT_EQ(bank.Use(ids).misses, expected);
  }
}

TEST(RowBankTest, Places_LeaveRoomForAsManyRowsAgain) {
  for (const int64_t slots : {int64_t{1}, int64_t{63}, int64_t{64}, int64_t{5000}, kMaxBankSlots}) {
    const int64_t places = RowBankPlaces(slots);
    EXPECT_EQ(places & (places - 1), 0);
    EXPECT_LE(2 * slots, places / 2);
  }
}

}  // namespace
}  // namespace carrel::kernels
