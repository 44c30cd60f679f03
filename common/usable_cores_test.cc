#include "common/usable_cores.h"

#include <sched.h>

#include <filesystem>
#include <limits>
#include <thread>

#include "common/file.h"
#include "common/test_util.h"

namespace carrel {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

TEST(UsableCores, AreNoMoreThanAThreadMayRunOn) {
  EXPECT_GE(UsableCores(), 1);
  std::thread([] {
    cpu_set_t all;
    ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    int first = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(UsableCores(), 1);
  }).join();
}

class ControlGroupCoresTest : public ::testing::Test {
 protected:
  void Write(const std::string& file, const std::string& text) {
    const std::filesystem::path path = root_ + "/" + file;
    std::filesystem::create_directories(path.parent_path());
    CARREL_ASSERT_OK(WriteFileAtomically(path.string(), text));
  }
  const std::string root_ = FreshTempDir();
};

TEST_F(ControlGroupCoresTest, Version2_TheLeastOfAGroupAndThoseAboveIt) {
  const std::string here = "0::/a/b\n";
  EXPECT_EQ(ControlGroupCores(root_, here), kNone);
  Write("a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(ControlGroupCores(root_, here), kNone);
  Write("a/b/cpu.max", "350000 100000\n");
  EXPECT_EQ(ControlGroupCores(root_, here), 3);
  Write("a/cpu.max", "200000 100000\n");
  EXPECT_EQ(ControlGroupCores(root_, here), 2);
  Write("cpu.max", "50000 100000\n");
  EXPECT_EQ(ControlGroupCores(root_, here), 1);
  EXPECT_EQ(ControlGroupCores(root_, "0::/\n"), 1);
  Write("cpu.max", "no number\n");
  EXPECT_EQ(ControlGroupCores(root_, "0::/\n"), kNone);
}

TEST_F(ControlGroupCoresTest, Version1_QuotaAndPeriodOfTheCpuController) {
  const std::string here = "7:memory:/m\n4:cpu,cpuacct:/a\n";
  Write("cpu/a/cpu.cfs_period_us", "100000\n");
  Write("cpu/a/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(ControlGroupCores(root_, here), kNone);
  Write("cpu/a/cpu.cfs_quota_us", "400000\n");
  EXPECT_EQ(ControlGroupCores(root_, here), 4);
  EXPECT_EQ(ControlGroupCores(root_, "7:memory:/a\n"), kNone);
}

}  // namespace
}  // namespace carrel
