#include "kvstore/storage/unfinished.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>

#include "absl/cleanup/cleanup.h"
#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;
using absl::StatusCode;

class UnfinishedTest : public testing::Test {
 protected:
  void SetUp() override { folder_ = FreshTempDir(); }
  // A prefill of that many bytes that was last written to so long ago.
  void Leave(const std::string& name, size_t bytes, absl::Duration ago) {
    const fs::path path = UnfinishedFolder(folder_, name);
    fs::create_directories(path);
    CARREL_ASSERT_OK(WriteFileAtomically((path / "job").string(), std::string(bytes, 'x')));
    const auto time = fs::file_time_type::clock::now() - absl::ToChronoSeconds(ago);
    fs::last_write_time(path / "job", time);
    fs::last_write_time(path, time);
  }
  bool Is(const std::string& name) const { return fs::exists(UnfinishedFolder(folder_, name)); }

  std::string folder_;
};

TEST_F(UnfinishedTest, List_TellsSizeAgeAndWhoWorks) {
  EXPECT_TRUE(ListUnfinished(folder_)->empty());
  Leave("b", 20, absl::Hours(60));
  Leave("a", 10, absl::Hours(50));
  CARREL_ASSERT_OK(WriteFileAtomically(folder_ + "/prefill/a-file", "no prefill"));
  const auto working = FolderLock::Take(UnfinishedFolder(folder_, "b"));
  CARREL_ASSERT_OK(working);
  const auto all = ListUnfinished(folder_);
  CARREL_ASSERT_OK(all);
  ASSERT_EQ(all->size(), 2u);
  EXPECT_EQ((*all)[0].name, "a");
  EXPECT_EQ((*all)[0].bytes, 10);
  EXPECT_FALSE((*all)[0].running);
  EXPECT_NEAR(absl::ToDoubleHours(absl::Now() - (*all)[0].touched), 50, 0.1);
  EXPECT_EQ((*all)[1].name, "b");
  EXPECT_TRUE((*all)[1].running);
}

TEST_F(UnfinishedTest, Remove_TakesWhatNobodyWorksOn) {
  Leave("a", 10, absl::Hours(1));
  {
    const auto working = FolderLock::Take(UnfinishedFolder(folder_, "a"));
    CARREL_ASSERT_OK(working);
    EXPECT_THAT(RemoveUnfinished(folder_, "a"),
                StatusIs(StatusCode::kFailedPrecondition, "is being worked on"));
  }
  CARREL_EXPECT_OK(RemoveUnfinished(folder_, "a"));
  EXPECT_FALSE(Is("a"));
  EXPECT_THAT(RemoveUnfinished(folder_, "a"),
              StatusIs(StatusCode::kNotFound, "prefill a in store"));
  EXPECT_THAT(RemoveUnfinished(folder_, "../db"), StatusIs(StatusCode::kInvalidArgument, "name"));
}

TEST_F(UnfinishedTest, Sweep_KeepsWhatIsYoungWantedOrWorkedOn) {
  Leave("old", 10, kUnfinishedAge + absl::Hours(1));
  Leave("young", 20, kUnfinishedAge - absl::Hours(1));
  Leave("waiting", 40, absl::Hours(1000));
  Leave("running", 80, absl::Hours(1000));
  Leave("failed", 160, absl::Seconds(5));
  const auto working = FolderLock::Take(UnfinishedFolder(folder_, "running"));
  const RemovedUnfinished removed = SweepUnfinished(folder_, [](const std::string& name) {
    if (name == "waiting") return absl::InfiniteDuration();
    return name == "failed" ? absl::ZeroDuration() : kUnfinishedAge;
  });
  EXPECT_EQ(removed.prefills, 2);
  EXPECT_EQ(removed.bytes, 170);
  EXPECT_FALSE(Is("old"));
  EXPECT_FALSE(Is("failed"));
  EXPECT_TRUE(Is("young") && Is("waiting") && Is("running"));
}

TEST_F(UnfinishedTest, Store_ListsDeletesAndSweepsThem) {
  auto store = *Store::Open(folder_, StoreMode::kReadWrite);
  TestContextSpec spec;
  CARREL_ASSERT_OK(PublishTestContext(*store, folder_ + "/files", spec));
  Leave(spec.name, 10, absl::Hours(1));
  Leave("half", 20, absl::Hours(1));
  EXPECT_EQ(store->ListUnfinished()->size(), 2u);
  CARREL_EXPECT_OK(store->Delete("half"));
  EXPECT_FALSE(Is("half"));
  CARREL_EXPECT_OK(store->Delete(spec.name));  // the context comes first
  EXPECT_TRUE(Is(spec.name));
  CARREL_EXPECT_OK(store->Delete(spec.name));
  EXPECT_THAT(store->Delete(spec.name), StatusIs(StatusCode::kNotFound, "is not in store"));
  Leave("old", 10, absl::Hours(200));
  EXPECT_EQ(store->RemoveOldUnfinished(absl::Hours(100)).prefills, 1);
  EXPECT_TRUE(store->ListUnfinished()->empty());
}

TEST(StoreAccessTest, OutOfDescriptors_IsNoDamage) {
#ifdef CARREL_SANITIZED
  GTEST_SKIP() << "UBSan asks with a pipe whether it may read an object, and takes its want for a "
                  "bad pointer";
#endif
  const std::string folder = FreshTempDir();
  {
    auto store = *Store::Open(folder, StoreMode::kReadWrite);
    for (int i = 0; i < 27; ++i) {
      TestContextSpec spec;
      spec.name = absl::StrCat("c", i);
      CARREL_ASSERT_OK(PublishTestContext(*store, folder + "/files", spec));
    }
  }
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const absl::Cleanup restore = [&] { setrlimit(RLIMIT_NOFILE, &before); };
  int opened = 0;
  for (int least = dup(0), more = 0; more < 60; ++more) {
    if (more == 0) close(least);
    rlimit limit = before;
    limit.rlim_cur = static_cast<rlim_t>(least + more);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    const auto store = Store::Open(folder, StoreMode::kReadOnly);
    absl::Status status = store.status();
    if (status.ok()) {
      std::vector<absl::Status> unreadable;
      status = (*store)->List(&unreadable).status();
      EXPECT_TRUE(unreadable.empty()) << unreadable.front();
    }
    if (status.ok()) status = (*store)->OpenContext("c3").status();
    if (status.ok()) ++opened;
    if (!status.ok()) {
      EXPECT_THAT(status, StatusIs(StatusCode::kResourceExhausted, "ulimit -n")) << more;
    }
  }
  EXPECT_GT(opened, 0);
  EXPECT_LT(opened, 60);
}

TEST(StoreAccessTest, FolderOfAnother_IsPermissionDenied) {
  constexpr uid_t kNobody = 65534;
  const std::string folder = FreshTempDir() + "/store";
  CARREL_ASSERT_OK(Store::Open(folder, StoreMode::kReadWrite));
  const uid_t me = geteuid();
  if (me != 0) fs::permissions(folder, fs::perms::none);
  ASSERT_EQ(me == 0 ? seteuid(kNobody) : 0, 0);
  const absl::Cleanup restore = [&] {
    ASSERT_EQ(seteuid(me), 0);
    fs::permissions(folder, fs::perms::owner_all);
  };
  for (const StoreMode mode : {StoreMode::kReadOnly, StoreMode::kReadWrite}) {
    EXPECT_THAT(Store::Open(folder, mode), StatusIs(StatusCode::kPermissionDenied, folder));
    EXPECT_THAT(Store::Open(folder, mode), StatusIs(StatusCode::kPermissionDenied, "user "));
  }
}

}  // namespace
}  // namespace carrel::kvstore
