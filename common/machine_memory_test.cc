#include "common/machine_memory.h"

#include <filesystem>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/test_util.h"

namespace carrel {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

TEST(MachineMemory, IsPositive) { EXPECT_GT(MachineMemoryBytes(), 0); }

TEST(MachineMemory, ControlGroups_TheLeastOnTheWayUpCounts) {
  const std::string root = FreshTempDir();
  const auto write = [&](const std::string& file, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root + file).parent_path());
    CARREL_ASSERT_OK(WriteFileAtomically(root + file, text));
  };
  write("/pods/memory.max", "3000000\n");
  write("/pods/carrel/memory.max", "max\n");
  write("/pods/small/memory.max", "1000\n");
  write("/memory/docker/abc/memory.limit_in_bytes", "2000\n");
  EXPECT_EQ(ControlGroupMemoryBytes(root, "0::/pods/carrel\n"), 3000000);
  EXPECT_EQ(ControlGroupMemoryBytes(root, "0::/pods/small\n"), 1000);
  EXPECT_EQ(ControlGroupMemoryBytes(root, "0::/\n"), kNone);
  EXPECT_EQ(ControlGroupMemoryBytes(root, "9:cpu:/x\n7:hugetlb,memory:/docker/abc\n"), 2000);
  EXPECT_EQ(ControlGroupMemoryBytes(root, ""), kNone);
}

}  // namespace
}  // namespace carrel
