#include "kvstore/engine/index_cache.h"

#include <atomic>
#include <random>
#include <thread>

#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

class FakeIndex : public Index {
 public:
  explicit FakeIndex(int64_t bytes, int32_t name) : name(name), bytes_(bytes) {}
  IndexKind kind() const override { return IndexKind::kHnsw; }
  absl::Status Search(const SearchRequest&, SearchScratch&, SearchResult&) const override {
    return absl::OkStatus();
  }
  int64_t resident_bytes() const override { return bytes_; }
  const int32_t name;

 private:
  const int64_t bytes_;
};

IndexKey Key(int32_t layer, uint64_t context = 1) {
  return {ContextId(context), Layer(layer), KvHead(0)};
}

absl::StatusOr<IndexCache::Lease> Get(IndexCache& cache, const IndexKey& key, int64_t bytes) {
  return cache.Acquire(
      key, [&]() -> absl::StatusOr<int64_t> { return bytes; },
      [&]() -> absl::StatusOr<std::unique_ptr<Index>> {
        return std::make_unique<FakeIndex>(bytes, key.layer.value());
      });
}

TEST(IndexCache, SecondAcquire_DoesNotLoadAgain) {
  IndexCache cache(100);
  for (int i = 0; i < 3; ++i) CARREL_ASSERT_OK(Get(cache, Key(0), 40));
  EXPECT_EQ(cache.counters().loads, 1);
  EXPECT_EQ(cache.counters().resident_bytes, 40);
}

TEST(IndexCache, Full_LeastRecentlyUsedGoes) {
  IndexCache cache(100);
  CARREL_ASSERT_OK(Get(cache, Key(0), 40));
  CARREL_ASSERT_OK(Get(cache, Key(1), 40));
  CARREL_ASSERT_OK(Get(cache, Key(0), 40));
  CARREL_ASSERT_OK(Get(cache, Key(2), 40));  // 1 goes
  EXPECT_EQ(cache.counters().evictions, 1);
  CARREL_ASSERT_OK(Get(cache, Key(0), 40));
  EXPECT_EQ(cache.counters().loads, 3);
  CARREL_ASSERT_OK(Get(cache, Key(1), 40));
  EXPECT_EQ(cache.counters().loads, 4);
}

TEST(IndexCache, LargerThanTheBudget_IsResourceExhaustedNamingBoth) {
  IndexCache cache(100);
  EXPECT_THAT(Get(cache, Key(3), 101),
              StatusIs(StatusCode::kResourceExhausted,
                       "index of 101 bytes (layer=3 kv_head=0) exceeds memory_budget_bytes=100"));
  EXPECT_EQ(cache.counters().resident_bytes, 0);
  CARREL_EXPECT_OK(Get(cache, Key(3), 100));
}

TEST(IndexCache, FailedLoad_IsForgottenAndTriedAgain) {
  IndexCache cache(100);
  const auto failing = cache.Acquire(
      Key(0), []() -> absl::StatusOr<int64_t> { return 60; },
      []() -> absl::StatusOr<std::unique_ptr<Index>> { return absl::DataLossError("bad blob"); });
  EXPECT_THAT(failing, StatusIs(StatusCode::kDataLoss, "bad blob"));
  EXPECT_EQ(cache.counters().resident_bytes, 0);
  CARREL_EXPECT_OK(Get(cache, Key(0), 60));
}

TEST(IndexCache, RoomTakenByOneInUse_IsWaitedFor) {
  IndexCache cache(100);
  auto held = std::make_unique<absl::StatusOr<IndexCache::Lease>>(Get(cache, Key(0), 80));
  std::atomic<bool> acquired{false};
  std::thread other([&] {
    CARREL_EXPECT_OK(Get(cache, Key(1), 80));
    acquired = true;
  });
  EXPECT_FALSE(acquired);  // cannot be: the room is held
  held.reset();
  other.join();
  EXPECT_TRUE(acquired);
  EXPECT_EQ(cache.counters().resident_bytes, 80);
}

TEST(IndexCache, DropContext_FreesItsIndexesOnly) {
  IndexCache cache(100);
  CARREL_ASSERT_OK(Get(cache, Key(0, 1), 30));
  CARREL_ASSERT_OK(Get(cache, Key(0, 2), 30));
  cache.DropContext(ContextId(1));
  EXPECT_EQ(cache.counters().resident_bytes, 30);
  CARREL_ASSERT_OK(Get(cache, Key(0, 2), 30));
  EXPECT_EQ(cache.counters().loads, 2);
}

TEST(IndexCache, DropContextWhileInUse_KeepsTheIndexUntilItIsGivenBack) {
  IndexCache cache(100);
  {
    const auto lease = Get(cache, Key(5), 30);
    CARREL_ASSERT_OK(lease);
    cache.DropContext(ContextId(1));
    EXPECT_EQ(static_cast<const FakeIndex&>(**lease).name, 5);
  }
  EXPECT_EQ(cache.counters().resident_bytes, 0);
}

std::optional<IndexCache::Lease> Try(IndexCache& cache, const IndexKey& key, int64_t bytes,
                                     bool admit = true) {
  return cache.TryAcquire(
      key, bytes, [&] { return admit; },
      [&]() -> std::unique_ptr<Index> {
        return std::make_unique<FakeIndex>(bytes, key.layer.value());
      });
}

TEST(IndexCache, TryAcquire_TakesNobodysRoomAndWaitsForNobody) {
  IndexCache cache(100);
  CARREL_ASSERT_OK(Get(cache, Key(0), 40));
  EXPECT_FALSE(Try(cache, Key(1), 61).has_value());
  EXPECT_FALSE(Try(cache, Key(1), 60, /*admit=*/false).has_value());
  EXPECT_EQ(cache.counters().resident_bytes, 40);
  EXPECT_TRUE(Try(cache, Key(1), 60).has_value());
  EXPECT_EQ(cache.counters().resident_bytes, 100);
  EXPECT_TRUE(Try(cache, Key(1), 60, /*admit=*/false).has_value());  // it is there
  EXPECT_FALSE(Try(cache, Key(2), 1).has_value());
  EXPECT_EQ(cache.counters().evictions, 0);
  // Who must have room takes that of spare ones, too.
  CARREL_ASSERT_OK(Get(cache, Key(0), 40));
  CARREL_ASSERT_OK(Get(cache, Key(3), 50));
  EXPECT_EQ(cache.counters().evictions, 1);
  EXPECT_EQ(cache.counters().resident_bytes, 90);
}

TEST(IndexCache, TryAcquireOfOneThatIsBeingLoaded_IsNone) {
  IndexCache cache(100);
  CARREL_ASSERT_OK(cache.Acquire(
      Key(0), []() -> absl::StatusOr<int64_t> { return 10; },
      [&]() -> absl::StatusOr<std::unique_ptr<Index>> {
        EXPECT_FALSE(Try(cache, Key(0), 10).has_value());
        return std::make_unique<FakeIndex>(10, 0);
      }));
  EXPECT_TRUE(Try(cache, Key(0), 10).has_value());
}

TEST(IndexCache, Shed_LetsSpareOnesGoThatNobodyUses) {
  IndexCache cache(100);
  CARREL_ASSERT_OK(Get(cache, Key(0), 10));
  for (const int32_t layer : {1, 2, 3}) EXPECT_TRUE(Try(cache, Key(layer), 20).has_value());
  {
    const auto used = Try(cache, Key(1), 20);
    cache.Shed(1);  // 2 is the least recently used
    EXPECT_EQ(cache.counters().resident_bytes, 50);
    cache.Shed(100);
    EXPECT_EQ(cache.counters().resident_bytes, 30);
  }
  EXPECT_TRUE(Try(cache, Key(1), 20, /*admit=*/false).has_value());
  cache.Shed(0);
  EXPECT_EQ(cache.counters().resident_bytes, 30);
  cache.Shed(1);
  EXPECT_EQ(cache.counters().resident_bytes, 10);
}

TEST(IndexCache, DropChanged_ForgetsOlderOnesOfThatOpeningAndLayer) {
  IndexCache cache(100);
  const auto key = [](int32_t layer, int64_t opening, int64_t changes) {
    IndexKey key = Key(layer);
    key.opening = opening;
    key.changes = changes;
    return key;
  };
  for (const IndexKey& one : {key(0, 7, 1), key(0, 7, 2), key(0, 8, 1), key(1, 7, 1)}) {
    EXPECT_TRUE(Try(cache, one, 10).has_value());
  }
  const auto used = Try(cache, key(0, 7, 1), 10);
  cache.DropChanged(ContextId(1), 7, Layer(0), 2);
  EXPECT_EQ(cache.counters().resident_bytes, 30);
  for (const IndexKey& one : {key(0, 7, 2), key(0, 8, 1), key(1, 7, 1)}) {
    EXPECT_TRUE(Try(cache, one, 10, /*admit=*/false).has_value());
  }
  EXPECT_FALSE(Try(cache, key(0, 7, 1), 10, /*admit=*/false).has_value());
}

TEST(IndexCache, ManyThreads_GetTheRightIndexWithinTheBudget) {
  const uint64_t seed = TestSeed();
  IndexCache cache(100);
  std::atomic<int64_t> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 rng(seed + t);
      for (int i = 0; i < 500; ++i) {
        const int32_t layer = static_cast<int32_t>(rng() % 6);
        const auto lease = Get(cache, Key(layer), 35);
        if (!lease.ok() || static_cast<const FakeIndex&>(**lease).name != layer) ++wrong;
        if (cache.counters().resident_bytes > 100) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(cache.counters().evictions, 0);
}

}  // namespace
}  // namespace carrel::kvstore
