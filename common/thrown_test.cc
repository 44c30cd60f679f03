#include "common/thrown.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "absl/synchronization/notification.h"
#include "common/test_util.h"
#include "common/thread_pool.h"

namespace carrel {
namespace {

using absl::StatusCode;

TEST(CatchThrown, AnyException_IsAStatus) {
  EXPECT_THAT(CatchThrown("request 7", []() -> absl::Status { throw std::runtime_error("why"); }),
              StatusIs(StatusCode::kInternal, "request 7: an exception: why"));
  EXPECT_THAT(CatchThrown("request 8", []() -> absl::Status { throw 3; }),
              StatusIs(StatusCode::kInternal, "request 8: an exception: of an unknown kind"));
  EXPECT_THAT(CatchThrown("request 9", []() -> absl::Status { throw std::bad_alloc(); }),
              StatusIs(StatusCode::kResourceExhausted, "request 9: out of memory"));
  const auto of_system = [](std::errc code) {
    return CatchThrown(
        "pool", [&]() -> absl::Status { throw std::system_error(std::make_error_code(code)); });
  };
  EXPECT_THAT(of_system(std::errc::resource_unavailable_try_again),
              StatusIs(StatusCode::kResourceExhausted, "pool: no thread can be started"));
  EXPECT_THAT(of_system(std::errc::invalid_argument),
              StatusIs(StatusCode::kInternal, "pool: an exception: "));
}

TEST(CatchThrown, WhatAUnitOfALoopThrows_IsThrownInItsCaller) {
  ThreadPool pool(3);
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> ran{0};
    const absl::Status status = CatchThrown("loop", [&] {
      pool.ParallelFor(100, [&](int64_t i) {
        ++ran;
        if (i == round % 100) throw std::runtime_error("unit");
      });
      return absl::OkStatus();
    });
    EXPECT_THAT(status, StatusIs(StatusCode::kInternal, "loop: an exception: unit"));
    EXPECT_GE(ran.load(), 1);
  }
  std::atomic<int> inner{0};
  EXPECT_THAT(CatchThrown("loops",
                          [&] {
                            pool.ParallelForOfLoops(8, [&](int64_t i) {
                              pool.ParallelFor(8, [&](int64_t j) {
                                ++inner;
                                if (i == 3 && j == 5) throw std::runtime_error("inner");
                              });
                            });
                            return absl::OkStatus();
                          }),
              StatusIs(StatusCode::kInternal, "inner"));
  pool.ParallelFor(8, [&](int64_t) { ++inner; });  // and it goes on
}

TEST(CatchThrown, ATaskThatThrows_EndsNeitherItsPoolNorTheProcess) {
  ThreadPool pool(1);
  ASSERT_TRUE(pool.TrySubmit([] { throw std::runtime_error("task"); }));
  absl::Notification ran;
  ASSERT_TRUE(pool.TrySubmit([&] { ran.Notify(); }));
  ran.WaitForNotification();
}

}  // namespace
}  // namespace carrel
