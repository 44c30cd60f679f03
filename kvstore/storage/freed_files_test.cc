#include "kvstore/storage/freed_files.h"

#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

class FreedFilesTest : public testing::Test {
 protected:
  std::string Made(const std::string& name) {
    std::string path = folder_ + "/" + name;
    CARREL_EXPECT_OK(WriteFileAtomically(path, "bytes of " + name));
    return path;
  }

  const std::string folder_ = FreshTempDir();
  const std::string aside_ = folder_ + "/aside/freed";
};

TEST_F(FreedFilesTest, KeepsBytesUntilTheEnd_ThenNothing) {
  std::vector<std::string> paths;
  for (int i = 0; i < 20; ++i) paths.push_back(Made(std::to_string(i)));
  {
    const FreedFiles files(paths, aside_);
    for (const std::string& path : paths) {
      EXPECT_EQ(fs::hard_link_count(path), 2) << path;
      fs::remove(path);
    }
    EXPECT_EQ(std::distance(fs::directory_iterator(aside_), fs::directory_iterator()), 20);
  }
  EXPECT_FALSE(fs::exists(aside_));
}

TEST_F(FreedFilesTest, WithoutASecondName_LeavesTheFile) {
  const std::string there = Made("there");
  {
    const FreedFiles missing({folder_ + "/missing", there}, aside_);
    EXPECT_EQ(fs::hard_link_count(there), 2);
  }
  EXPECT_FALSE(fs::exists(aside_));
  { const FreedFiles nowhere({there}, there + "/freed"); }  // a file is no folder
  EXPECT_EQ(*ReadFile(there), "bytes of there");
  EXPECT_EQ(fs::hard_link_count(there), 1);
}

}  // namespace
}  // namespace carrel::kvstore
