#include "kvstore/engine/work_queue.h"

#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

TEST(WorkQueueTest, ManyRequestsOfOneSession_LeaveTheOthersTheirTurn) {
  std::string order;
  absl::Mutex mu;
  absl::Notification started, go, done;
  const int greedy = 0, modest = 0;
  {
    WorkQueue queue(1, 100);
    CARREL_EXPECT_OK(queue.Submit(nullptr, &greedy, [&] {
      started.Notify();
      go.WaitForNotification();
    }));
    started.WaitForNotification();
    const auto task = [&](char name) {
      return [&, name] {
        absl::MutexLock lock(&mu);
        order += name;
      };
    };
    for (int i = 0; i < 5; ++i) CARREL_EXPECT_OK(queue.Submit(nullptr, &greedy, task('g')));
    for (int i = 0; i < 2; ++i) CARREL_EXPECT_OK(queue.Submit(nullptr, &modest, task('m')));
    EXPECT_EQ(queue.waiting(), 7);
    go.Notify();
  }  // runs what was accepted
  EXPECT_EQ(order, "gmgmggg");
}

TEST(WorkQueueTest, ManySessionsOfOneTenant_LeaveTheOthersTheirTurn) {
  std::string order;
  absl::Mutex mu;
  absl::Notification started, go;
  const int big = 0, small = 0;
  const int sessions[4] = {};
  {
    WorkQueue queue(1, 100);
    CARREL_EXPECT_OK(queue.Submit(nullptr, nullptr, [&] {
      started.Notify();
      go.WaitForNotification();
    }));
    started.WaitForNotification();
    const auto task = [&](char name) {
      return [&, name] {
        absl::MutexLock lock(&mu);
        order += name;
      };
    };
    for (int i = 0; i < 2; ++i) {  // a tenant with three sessions, and one with one
      for (int s = 0; s < 3; ++s) {
        CARREL_EXPECT_OK(queue.Submit(&big, &sessions[s], task(static_cast<char>('a' + s))));
      }
    }
    for (int i = 0; i < 3; ++i) CARREL_EXPECT_OK(queue.Submit(&small, &sessions[3], task('s')));
    go.Notify();
  }
  EXPECT_EQ(order, "asbscsabc");
}

TEST(WorkQueueTest, Full_IsResourceExhaustedAndRunsWhatWasAccepted) {
  absl::Notification started, go;
  std::atomic<int> ran{0};
  {
    WorkQueue queue(1, 2);
    CARREL_EXPECT_OK(queue.Submit(nullptr, nullptr, [&] {
      started.Notify();
      go.WaitForNotification();
    }));
    started.WaitForNotification();
    for (int i = 0; i < 2; ++i) CARREL_EXPECT_OK(queue.Submit(nullptr, nullptr, [&] { ++ran; }));
    EXPECT_THAT(queue.Submit(nullptr, nullptr, [&] { ++ran; }),
                StatusIs(absl::StatusCode::kResourceExhausted, "queue_limit=2"));
    go.Notify();
  }
  EXPECT_EQ(ran, 2);
}

}  // namespace
}  // namespace carrel::kvstore
