#include "kvstore/engine/background_checks.h"

#include <stdexcept>

#include "absl/time/clock.h"
#include "common/test_util.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

// A context of `steps` scrub steps, of which `damaged` files are damaged.
class FakeContext : public StoredContext {
 public:
  FakeContext(int steps, int damaged) : steps_(steps), damaged_(damaged) {}
  const v1::Manifest& manifest() const override { std::abort(); }
  absl::StatusOr<std::shared_ptr<const PinnedSegment>> Segment(int32_t, Kind, KvHead,
                                                               uint32_t) const override {
    return absl::NotFoundError("");
  }
  absl::StatusOr<uint32_t> SegmentCount(int32_t, Kind, KvHead) const override { return 0u; }
  void Scrub(absl::FunctionRef<bool(int64_t)> go_on,
             std::vector<absl::Status>& damaged) const override {
    for (int i = 0; i < damaged_; ++i) damaged.push_back(absl::DataLossError("bits"));
    for (int i = 0; i < steps_ && go_on(kScrubStep); ++i) ++done;
  }
  mutable std::atomic<int> done{0};

 private:
  const int steps_, damaged_;
};

bool WaitUntil(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000 && !condition(); ++i) absl::SleepFor(absl::Milliseconds(5));
  return condition();
}

struct World {
  std::shared_ptr<FakeContext> context;
  std::atomic<bool> busy{false};
  std::atomic<int> looks{0};
  BackgroundChecks::Source source() {
    return {.look = [this] { ++looks; },
            .names =
                [] {
                  return std::vector<std::string>{"a", "gone"};
                },
            .find = [this](const std::string& name)
                -> absl::StatusOr<std::shared_ptr<const StoredContext>> {
              if (name == "gone") return absl::NotFoundError("deleted");
              return std::shared_ptr<const StoredContext>(context);
            },
            .busy = [this] { return busy.load(); }};
  }
};

TEST(BackgroundChecksTest, Pass_CountsBytesPassesAndFailures) {
  World world{.context = std::make_shared<FakeContext>(3, 2)};
  const BackgroundChecks checks(world.source(), int64_t{1} << 34);
  ASSERT_TRUE(WaitUntil([&] { return checks.counters().passes >= 1; }));
  const BackgroundChecks::Counters counters = checks.counters();
  EXPECT_EQ(counters.failures, 2 * counters.passes);
  EXPECT_EQ(counters.scrubbed_bytes, 3 * counters.passes * StoredContext::kScrubStep);
  EXPECT_GE(world.looks, 1);
}

TEST(BackgroundChecksTest, NoRate_LooksAndDoesNotScrub) {
  World world{.context = std::make_shared<FakeContext>(3, 0)};
  const BackgroundChecks checks(world.source(), 0);
  ASSERT_TRUE(WaitUntil([&] { return world.looks >= 2; }));
  EXPECT_EQ(world.context->done, 0);
  EXPECT_EQ(checks.counters().passes, 0);
}

TEST(BackgroundChecksTest, WhatALookThrows_EndsNeitherTheThreadNorTheProcess) {
  World world{.context = std::make_shared<FakeContext>(3, 0)};
  BackgroundChecks::Source source = world.source();
  source.look = [&] {
    if (++world.looks == 1) throw std::runtime_error("planted");
  };
  const BackgroundChecks checks(source, 0);
  EXPECT_TRUE(WaitUntil([&] { return world.looks >= 2; }));
}

TEST(BackgroundChecksTest, LowRate_IsKeptAndEndsAtOnceWithItsOwner) {
  World world{.context = std::make_shared<FakeContext>(1000, 0)};
  {
    // A step takes 100 s.
    const BackgroundChecks checks(world.source(), StoredContext::kScrubStep / 100);
    ASSERT_TRUE(WaitUntil([&] { return checks.counters().scrubbed_bytes > 0; }));
    EXPECT_EQ(checks.counters().scrubbed_bytes, StoredContext::kScrubStep);
  }
  EXPECT_EQ(world.context->done, 0);
}

TEST(BackgroundChecksTest, RequestsWait_ScrubbingPausesButNotForEver) {
  World world{.context = std::make_shared<FakeContext>(1000, 0)};
  world.busy = true;
  const BackgroundChecks checks(world.source(), int64_t{1} << 34);
  ASSERT_TRUE(WaitUntil([&] { return world.context->done >= 1; }));
  EXPECT_LT(world.context->done, 100);
  world.busy = false;
  EXPECT_TRUE(WaitUntil([&] { return world.context->done >= 1000; }));
}

}  // namespace
}  // namespace carrel::kvstore
