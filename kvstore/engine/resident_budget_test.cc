#include "kvstore/engine/resident_budget.h"

#include <sys/mman.h>

#include <cstring>
#include <string>

#include "absl/time/clock.h"
#include "common/file.h"
#include "common/mapped_file.h"
#include "common/test_util.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kFileBytes = int64_t{24} << 20;

// Layers that are files of their own.
class FileContext : public StoredContext {
 public:
  FileContext(const std::string& folder, int layers) {
    for (int i = 0; i < layers; ++i) {
      const std::string path = absl::StrCat(folder, "/layer", i);
      CARREL_EXPECT_OK(
          WriteFileAtomically(path, std::string(kFileBytes, static_cast<char>('a' + i))));
      files_.push_back(*MappedFile::Open(path));
    }
  }
  const v1::Manifest& manifest() const override { std::abort(); }
  absl::StatusOr<std::shared_ptr<const PinnedSegment>> Segment(int32_t, Kind, KvHead,
                                                               uint32_t) const override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint32_t> SegmentCount(int32_t, Kind, KvHead) const override { return 0; }
  void ReleasePages(int32_t layer) const override { files_[layer]->ReleasePages(); }

  int64_t Sum(int layer) const {
    int64_t sum = 0;
    for (const char c : files_[layer]->bytes()) sum += c;
    return sum;
  }

 private:
  std::vector<std::unique_ptr<MappedFile>> files_;
};

TEST(ResidentBudgetTest, MoreThanTheBudget_LetsTheOldestLayersGoAndTheyReadTheSame) {
#ifdef CARREL_SANITIZED
  GTEST_SKIP() << "a sanitizer's shadow memory counts as resident";
#endif
  const std::string folder = FreshTempDir();
  const auto context = std::make_shared<FileContext>(folder, 6);
  const int64_t before = ResidentBudget(0).MappedBytes();
  ASSERT_GT(before, 0);
  const int64_t allowed = before + 3 * kFileBytes;
  ResidentBudget budget(allowed);
  ResidentBudget::Layers layers(&budget, context, 6);
  int64_t most = 0;
  for (int round = 0; round < 3; ++round) {
    for (int layer = 0; layer < 6; ++layer) {
      layers.Touch(layer);
      budget.Enforce();
      EXPECT_EQ(context->Sum(layer), kFileBytes * ('a' + layer));
      most = std::max(most, budget.MappedBytes());
    }
  }
  EXPECT_GT(budget.releases(), 0);
  EXPECT_LE(most, allowed + kFileBytes);  // what was read since it looked
  budget.Enforce();
  EXPECT_LE(budget.MappedBytes(), allowed);
}

TEST(ResidentBudgetTest, BelowTheBudget_NothingIsLetGo) {
  const std::string folder = FreshTempDir();
  const auto context = std::make_shared<FileContext>(folder, 2);
  ResidentBudget budget(int64_t{1} << 45);
  ResidentBudget::Layers layers(&budget, context, 2);
  for (int layer = 0; layer < 2; ++layer) {
    layers.Touch(layer);
    budget.Enforce();
    EXPECT_EQ(context->Sum(layer), kFileBytes * ('a' + layer));
  }
  EXPECT_EQ(budget.releases(), 0);
}

TEST(ResidentBudgetTest, WhatCanBeSpared_GoesBeforeLayers) {
  const std::string folder = FreshTempDir();
  const auto context = std::make_shared<FileContext>(folder, 1);
  const int64_t allowed = ResidentBudget(0).MappedBytes() + 4 * kFileBytes;
  int64_t spare = 0, wanted = 0;
  ResidentBudget budget(
      allowed, [&] { return spare; },
      [&](int64_t bytes) {
        wanted = bytes;
        spare -= std::min(spare, bytes);
      });
  ResidentBudget::Layers layers(&budget, context, 1);
  layers.Touch(0);
  EXPECT_EQ(context->Sum(0), kFileBytes * 'a');
  EXPECT_TRUE(budget.HasSpareRoom(1));
  EXPECT_FALSE(budget.HasSpareRoom(allowed - budget.MappedBytes()));
  budget.Enforce();
  EXPECT_EQ(wanted, 0);
  spare = allowed;
  budget.Enforce();
  EXPECT_GT(wanted, 0);
  EXPECT_LT(spare, allowed);
  EXPECT_LE(budget.MappedBytes() + spare, allowed - allowed / 5 + kFileBytes);
  EXPECT_EQ(budget.releases(), 0);
}

// At most once a millisecond, and then it is Enforce.
TEST(ResidentBudgetTest, EnforceAtTimes_LetsGoAfterAPause) {
  const auto context = std::make_shared<FileContext>(FreshTempDir(), 1);
  ResidentBudget budget(1);
  ResidentBudget::Layers layers(&budget, context, 1);
  budget.EnforceAtTimes();  // nothing was touched
  for (int64_t i = 0; budget.releases() == 0; ++i) {
    ASSERT_LT(i, 10000);
    layers.Touch(0);
    EXPECT_EQ(context->Sum(0), kFileBytes * 'a');
    budget.EnforceAtTimes();
    absl::SleepFor(absl::Microseconds(100));
  }
}

// What clients made the heap hold is none of the layers' business.
TEST(ResidentBudgetTest, ALargeHeap_LetsNothingGoUnlessItCounts) {
  const std::string folder = FreshTempDir();
  const auto context = std::make_shared<FileContext>(folder, 1);
  const std::string heap(size_t{256} << 20, 'x');
  const int64_t mapped = ResidentBudget(0).MappedBytes();
  ResidentBudget budget(mapped + 2 * kFileBytes);
  EXPECT_GT(budget.ResidentBytes(), mapped + 2 * kFileBytes);
  ResidentBudget counting(mapped + 2 * kFileBytes, [] { return 8 * kFileBytes; });
  for (ResidentBudget* one : {&budget, &counting}) {
    ResidentBudget::Layers layers(one, context, 1);
    layers.Touch(0);
    EXPECT_EQ(context->Sum(0), kFileBytes * 'a');
    one->Enforce();
  }
  EXPECT_EQ(budget.releases(), 0);
  EXPECT_EQ(counting.releases(), 1);
}

}  // namespace
}  // namespace carrel::kvstore
