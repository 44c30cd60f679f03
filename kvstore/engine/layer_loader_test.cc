#include "kvstore/engine/layer_loader.h"

#include <array>
#include <atomic>

#include "absl/time/clock.h"
#include "common/test_util.h"
#include "kvstore/engine/resident_budget.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kLayerBytes = 8000;

class CountingContext : public StoredContext {
 public:
  const v1::Manifest& manifest() const override { std::abort(); }
  absl::StatusOr<std::shared_ptr<const PinnedSegment>> Segment(int32_t, Kind, KvHead,
                                                               uint32_t) const override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint32_t> SegmentCount(int32_t, Kind, KvHead) const override { return 0; }
  int64_t LayerBytes(int32_t) const override { return kLayerBytes; }
  int64_t LayerBytesAsked(int32_t layer) const override { return asked[layer]; }
  void Load(int32_t layer, const std::atomic<bool>& cancelled) const override {
    asked[layer] = 0;
    ++loads[layer];
    while (endless && !cancelled) absl::SleepFor(absl::Milliseconds(1));
  }

  bool endless = false;  // a disk that never comes to an end
  mutable std::array<std::atomic<int64_t>, 3> asked{}, loads{};
};

void WaitForLoads(const LayerLoader& loader, int64_t loads) {
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (loader.loads() < loads && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(loader.loads(), loads);
}

TEST(LayerLoaderTest, LayerOfWhichAnEighthWasAsked_IsLoadedOnce) {
  const ResidentBudget budget(int64_t{1} << 45);
  const auto context = std::make_shared<CountingContext>();
  LayerLoader loader(&budget);
  context->asked[1] = kLayerBytes / 8;
  context->asked[2] = kLayerBytes / 8 - 1;
  for (int round = 0; round < 100; ++round) {
    for (int32_t layer = 0; layer < 3; ++layer) loader.Touch(context, Layer(layer));
  }
  WaitForLoads(loader, 1);
  EXPECT_EQ(context->loads[0], 0);
  EXPECT_EQ(context->loads[1], 1);
  EXPECT_EQ(context->loads[2], 0);
  context->asked[2] = kLayerBytes;
  loader.Touch(context, Layer(2));
  WaitForLoads(loader, 2);
  EXPECT_EQ(context->loads[2], 1);
}

TEST(LayerLoaderTest, DestroyedWhileItLoads_DoesNotWaitForTheDisk) {
  const ResidentBudget budget(int64_t{1} << 45);
  const auto context = std::make_shared<CountingContext>();
  context->endless = true;
  context->asked[0] = context->asked[1] = kLayerBytes;
  {
    LayerLoader loader(&budget);
    loader.Touch(context, Layer(0));
    loader.Touch(context, Layer(1));
    while (context->loads[0] == 0) absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(context->loads[1], 0);
}

TEST(LayerLoaderTest, NoRoomInTheBudget_LoadsNothingAndForgets) {
  const ResidentBudget none(1);
  const auto context = std::make_shared<CountingContext>();
  context->asked[0] = kLayerBytes;
  {
    LayerLoader loader(&none);
    for (int round = 0; round < 100; ++round) {
      loader.Touch(context, Layer(0));
      absl::SleepFor(absl::Milliseconds(round < 5 ? 1 : 0));
    }
    EXPECT_EQ(loader.loads(), 0);
  }
  EXPECT_EQ(context->loads[0], 0);
  EXPECT_EQ(context.use_count(), 1);
}

}  // namespace
}  // namespace carrel::kvstore
