#include "common/scheduling.h"

#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "common/test_util.h"

namespace carrel {
namespace {

// Of the calling thread, from /proc; empty where the kernel does not tell.
std::string Slice() {
  std::ifstream file(absl::StrCat("/proc/self/task/", gettid(), "/sched"));
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("se.slice", 0) == 0) return line.substr(line.find(':') + 1);
  }
  return "";
}
int Niceness() { return getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())); }

TEST(SchedulingTest, ShortSlices_AreInheritedUntilAThreadWorksBehind) {
  std::thread([] {
    const std::string usual = Slice();
    const int niceness = Niceness();
    WakeSoon();
    const std::string soon = Slice();
    EXPECT_EQ(Niceness(), niceness);
    std::thread([&] {
      EXPECT_EQ(Slice(), soon);
      WorkBehind();
      EXPECT_EQ(Slice(), usual);
      EXPECT_GE(Niceness(), 10);
    }).join();
    EXPECT_EQ(Slice(), soon);
    EXPECT_EQ(Niceness(), niceness);
    if (usual.empty() || soon == usual) GTEST_SKIP() << "this kernel has no slices of threads";
  }).join();
}

}  // namespace
}  // namespace carrel
