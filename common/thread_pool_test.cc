#include "common/thread_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/test_util.h"
#include "common/thrown.h"

namespace carrel {
namespace {

TEST(ThreadPoolTest, ParallelFor_RunsEachIndexOnce) {
  for (int threads : {0, 1, 3}) {
    ThreadPool pool(threads);
    for (int64_t count : {0, 1, 2, 1000}) {
      std::vector<std::atomic<int>> runs(count);
      pool.ParallelFor(count, [&](int64_t i) { ++runs[i]; });
      for (auto& r : runs) EXPECT_EQ(r.load(), 1);
    }
  }
}

TEST(ThreadPoolTest, NestedLoopsOnABusyPool_DoNotDeadlock) {
  ThreadPool pool(2);
  std::atomic<int> runs{0};
  pool.ParallelFor(8, [&](int64_t) {
    pool.ParallelFor(8, [&](int64_t) { pool.ParallelFor(4, [&](int64_t) { ++runs; }); });
  });
  EXPECT_EQ(runs.load(), 256);
}

// Slots that loops lie in come back at once, and those who come late meet the next loop there.
TEST(ThreadPoolTest, ShortLoopsOfManyThreads_RunEachIndexOnce) {
  ThreadPool pool(5);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&pool, caller] {
      for (int round = 0; round < 3000; ++round) {
        std::vector<std::atomic<int>> runs(static_cast<size_t>(2 + (round + caller) % 7));
        const auto body = [&](int64_t i) {
          ++runs[static_cast<size_t>(i)];
          if (round % 5 == 0) pool.ParallelFor(3, [](int64_t) {});
          if (round % 11 == 0 && i == 1) throw std::runtime_error("one");
        };
        const auto run = [&] {
          if (round % 3 == 0) return pool.ParallelForOfLoops(std::ssize(runs), body);
          pool.ParallelFor(std::ssize(runs), body);
        };
        if (round % 11 == 0) {
          EXPECT_THROW(run(), std::runtime_error);
        } else {
          run();
          for (auto& r : runs) EXPECT_EQ(r.load(), 1);
        }
      }
    });
  }
  for (std::thread& thread : callers) thread.join();
}

TEST(ThreadPoolTest, LoopsDeeperThanThePoolCanShow_AreRunByTheirCallers) {
  ThreadPool pool(2);
  std::atomic<int> runs{0};
  const std::function<void(int)> nest = [&](int depth) {
    if (depth == 0) return;
    pool.ParallelFor(2, [&](int64_t i) {
      ++runs;
      if (i == 1) nest(depth - 1);
    });
  };
  nest(100);
  EXPECT_EQ(runs.load(), 200);
}

// Two threads, two units: the loop of the second one needs both threads at once.
TEST(ThreadPoolTest, WhoHasNoUnitOfALoopOfLoops_TakesPartInThoseWithin) {
  for (bool caller_waits : {false, true}) {
    ThreadPool pool(1);
    const std::thread::id caller = std::this_thread::get_id();
    absl::Notification both[2];
    std::atomic<int> met{0}, runs{0};
    pool.ParallelForOfLoops(2, [&](int64_t i) {
      both[i].Notify();  // each thread has one unit
      ASSERT_TRUE(both[1 - i].WaitForNotificationWithTimeout(absl::Seconds(60)));
      if ((std::this_thread::get_id() == caller) == caller_waits) return;
      if (caller_waits) absl::SleepFor(absl::Milliseconds(5));  // until it sleeps
      absl::Notification here[2];
      pool.ParallelFor(2, [&](int64_t j) {
        here[j].Notify();
        met += here[1 - j].WaitForNotificationWithTimeout(absl::Seconds(60));
        // A loop within a loop within.
        pool.ParallelFor(3, [&](int64_t) { ++runs; });
      });
    });
    EXPECT_EQ(met.load(), 2);
    EXPECT_EQ(runs.load(), 6);
  }
}

// A loop that another thread begins is none of theirs.
TEST(ThreadPoolTest, WhoWaitsForALoopOfLoops_TakesNoUnitOfAnotherOne) {
  ThreadPool pool(1);
  const std::thread::id caller = std::this_thread::get_id();
  absl::Notification both[2], begun, end;
  std::thread other([&] {
    begun.WaitForNotification();
    std::atomic<int> wrong{0};
    pool.ParallelFor(4, [&](int64_t) { wrong += std::this_thread::get_id() == caller; });
    EXPECT_EQ(wrong.load(), 0);
    end.Notify();
  });
  pool.ParallelForOfLoops(2, [&](int64_t i) {
    both[i].Notify();
    both[1 - i].WaitForNotification();
    if (std::this_thread::get_id() == caller) return;
    begun.Notify();
    end.WaitForNotification();
  });
  other.join();
}

// Tasks and loops come while workers fall asleep, wake and look: none may be left lying.
TEST(ThreadPoolTest, WorkThatComesAsWorkersFallAsleep_IsDone) {
  ThreadPool pool(3);
  const auto submit_and_loop = [&pool] {
    for (int round = 0; round < 2000; ++round) {
      absl::Notification done;
      ASSERT_TRUE(pool.TrySubmit([&] { done.Notify(); }));
      std::atomic<int> runs{0};
      pool.ParallelFor(1 + round % 5, [&](int64_t) { ++runs; });
      EXPECT_EQ(runs.load(), 1 + round % 5);
      // Only a worker can run the task: without one that wakes, this would wait for ever.
      ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(60)));
      if (round % 100 == 0) absl::SleepFor(absl::Milliseconds(1));
    }
  };
  std::thread other(submit_and_loop);
  submit_and_loop();
  other.join();
}

TEST(ThreadPoolTest, FullQueue_RefusesAndRunsOnlyTheAccepted) {
  std::atomic<int> runs{0};
  {
    // The task may still be leaving them when the pool is destroyed.
    absl::Notification started, go;
    ThreadPool pool(1, /*queue_limit=*/2);
    ASSERT_TRUE(pool.TrySubmit([&] {
      started.Notify();
      go.WaitForNotification();
      ++runs;
    }));
    started.WaitForNotification();
    EXPECT_TRUE(pool.TrySubmit([&] { ++runs; }));
    EXPECT_TRUE(pool.TrySubmit([&] { ++runs; }));
    EXPECT_FALSE(pool.TrySubmit([&] { runs += 100; }));
    EXPECT_EQ(pool.queued(), 2);
    go.Notify();
  }
  EXPECT_EQ(runs.load(), 3);
}

// Stacks take address space: of a thousand threads there is none for most.
TEST(ThreadPoolDeathTest, ThreadsThatCannotBeStarted_AreAnErrorAndNoAbort) {
#ifdef CARREL_SANITIZED
  GTEST_SKIP() << "a sanitizer reserves all address space";
#endif
  EXPECT_EXIT(
      {
        int64_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        rlimit limit{};
        getrlimit(RLIMIT_AS, &limit);
        limit.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + (int64_t{64} << 20));
        setrlimit(RLIMIT_AS, &limit);
        const absl::Status status = CatchThrown("pool", [] {
          const ThreadPool pool(1000);
          return absl::OkStatus();
        });
        std::_Exit(absl::IsResourceExhausted(status) ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace carrel
