#include "serving/turn_pool.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "absl/synchronization/notification.h"
#include "common/test_util.h"

namespace carrel::serving {
namespace {

Turn NewTurn() { return std::make_shared<const int>(0); }

// One key's requests have all threads but those in reserve, and none of them ends before another key's.
TEST(TurnPoolTest, ManyLongTasksOfOneTurn_KeepNobodyElseWaiting) {
  const Turn many = NewTurn(), other = NewTurn();
  absl::Notification go_on;
  std::atomic<int> begun{0};
  TurnPool pool({.places = 2});
  for (int i = 0; i < 10; ++i) {
    CARREL_ASSERT_OK(pool.Submit(many, [&] {
      ++begun;
      go_on.WaitForNotification();
    }));
  }
  for (int i = 0; i < 3; ++i) {
    absl::Notification done;
    CARREL_ASSERT_OK(pool.Submit(other, [&] { done.Notify(); }));
    done.WaitForNotification();
  }
  EXPECT_LE(begun, 2);
  go_on.Notify();
}

TEST(TurnPoolTest, WhatWasAccepted_IsDone_AndTurnByTurn) {
  std::string order;
  absl::Mutex mu;
  absl::Notification started, go_on;
  {
    TurnPool pool({.places = 1, .waiting = 6, .of_one_turn = 4});
    const auto task = [&](char name) {
      return [&, name] {
        absl::MutexLock lock(&mu);
        order += name;
      };
    };
    CARREL_ASSERT_OK(pool.Submit(nullptr, [&] {  // nobody's own: none in reserve beside it
      started.Notify();
      go_on.WaitForNotification();
    }));
    started.WaitForNotification();
    for (int i = 0; i < 4; ++i) CARREL_ASSERT_OK(pool.Submit(nullptr, task('n')));
    for (int i = 0; i < 2; ++i) CARREL_ASSERT_OK(pool.Submit(nullptr, task('o')));
    EXPECT_FALSE(pool.Submit(nullptr, task('p')).ok());
    pool.Continue(nullptr, task('q'));  // of a request that was accepted before
    go_on.Notify();
  }
  EXPECT_EQ(order, "nnnnooq");
}

TEST(TurnPoolTest, WhatATaskThrows_IsItsOwnEnd) {
  TurnPool pool({.places = 1});
  const Turn turn = NewTurn();
  for (int i = 0; i < 5; ++i) {
    CARREL_ASSERT_OK(pool.Submit(turn, [] { throw std::runtime_error("planted"); }));
  }
  absl::Notification done;
  CARREL_ASSERT_OK(pool.Submit(turn, [&] { done.Notify(); }));
  done.WaitForNotification();
}

}  // namespace
}  // namespace carrel::serving
