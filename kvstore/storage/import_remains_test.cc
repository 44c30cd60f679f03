#include "kvstore/storage/import_remains.h"

#include <filesystem>

#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/storage/unfinished.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

class ImportRemainsTest : public testing::Test {
 protected:
  void SetUp() override { folder_ = FreshTempDir() + "/importing"; }
  // An import of that many bytes that was last written to so long ago.
  void Leave(const std::string& id, size_t bytes, absl::Duration ago) {
    const fs::path path = fs::path(folder_) / id;
    fs::create_directories(path);
    CARREL_ASSERT_OK(WriteFileAtomically((path / "0000.part").string(), std::string(bytes, 'x')));
    const auto time = fs::file_time_type::clock::now() - absl::ToChronoSeconds(ago);
    fs::last_write_time(path / "0000.part", time);
    fs::last_write_time(path, time);
  }
  bool Is(const std::string& id) const { return fs::exists(folder_ + "/" + id); }

  std::string folder_;
};

TEST_F(ImportRemainsTest, OldOnes_GoUnlessSomebodyWorksOnThem) {
  Leave("a", 10, absl::Hours(50));
  Leave("b", 20, absl::Hours(60));
  Leave("c", 30, absl::Hours(1));
  Leave("of-somebody/d", 40, absl::Hours(70));
  Leave("of-somebody/e", 50, absl::Hours(2));
  {
    const absl::StatusOr<FolderLock> lock = FolderLock::TakeFile(folder_ + "/b.lock");
    CARREL_ASSERT_OK(lock);
    const RemovedRemains removed = RemoveOldImportRemains(folder_, absl::Hours(48));
    EXPECT_EQ(removed.imports, 2);
    EXPECT_EQ(removed.bytes, 50);
  }
  EXPECT_FALSE(Is("a"));
  EXPECT_TRUE(Is("b"));
  EXPECT_TRUE(Is("c"));
  EXPECT_FALSE(Is("of-somebody/d"));
  EXPECT_TRUE(Is("of-somebody/e"));
  EXPECT_EQ(RemoveOldImportRemains(folder_, absl::Hours(48)).imports, 1);
  EXPECT_FALSE(Is("b"));
  EXPECT_EQ(RemoveOldImportRemains(folder_ + "/nothing", absl::ZeroDuration()).imports, 0);
}

TEST_F(ImportRemainsTest, OldestOnes_GoUntilTheRestFits) {
  Leave("a", 100, absl::Hours(1));
  Leave("b", 100, absl::Hours(3));
  Leave("c", 100, absl::Hours(2));
  Leave("d", 500, absl::Hours(4));
  const absl::StatusOr<FolderLock> lock = FolderLock::TakeFile(folder_ + "/d.lock");
  CARREL_ASSERT_OK(lock);
  EXPECT_EQ(RemoveImportRemains(folder_, {.bytes = 300}).imports, 0);
  EXPECT_EQ(RemoveImportRemains(folder_, {.bytes = 299}).bytes, 100);
  EXPECT_TRUE(Is("a") && !Is("b") && Is("c") && Is("d"));
  EXPECT_EQ(RemoveImportRemains(folder_, {.bytes = 0}).imports, 2);
  EXPECT_TRUE(!Is("a") && !Is("c") && Is("d"));
}

// Who removes what was left removes its lock: another holder's is then of a file of that name.
TEST_F(ImportRemainsTest, Lock_IsOfTheFileThatHasTheName) {
  fs::create_directories(folder_);
  const std::string path = folder_ + "/a.lock";
  absl::StatusOr<FolderLock> first = FolderLock::TakeFile(path);
  CARREL_ASSERT_OK(first);
  EXPECT_THAT(FolderLock::TakeFile(path),
              StatusIs(absl::StatusCode::kFailedPrecondition, "another import"));
  fs::remove(path);
  const absl::StatusOr<FolderLock> second = FolderLock::TakeFile(path);
  CARREL_ASSERT_OK(second);
  *first = FolderLock();  // its end is nobody else's
  EXPECT_FALSE(FolderLock::TakeFile(path).ok());
}

}  // namespace
}  // namespace carrel::kvstore
