#include <atomic>
#include <cstring>
#include <thread>

#include "common/test_util.h"
#include "prefill/pinned_rows.h"

namespace carrel::prefill {
namespace {

TEST(PinnedRowsTest, AllTaken_WaitsUntilOneIsGivenBack) {
  auto rows = PinnedRows::Create(2, 1 << 20);
  CARREL_ASSERT_OK(rows);
  std::shared_ptr<void> first = (*rows)->Take(), second = (*rows)->Take();
  EXPECT_NE(first, second);
  std::memset(first.get(), 1, 1 << 20);
  void* const place = first.get();
  std::atomic<bool> given_back = false;
  std::thread reader([&, held = std::move(first)]() mutable {
    given_back = true;
    held.reset();
  });
  const std::shared_ptr<void> third = (*rows)->Take();
  EXPECT_TRUE(given_back);
  EXPECT_EQ(third.get(), place);
  reader.join();
}

TEST(PinnedRowsTest, HeldLongerThanTheObject_StaysValid) {
  auto rows = PinnedRows::Create(1, 4096);
  CARREL_ASSERT_OK(rows);
  const std::shared_ptr<void> held = (*rows)->Take();
  rows->reset();
  std::memset(held.get(), 7, 4096);
  EXPECT_EQ(static_cast<const char*>(held.get())[4095], 7);
}

}  // namespace
}  // namespace carrel::prefill
