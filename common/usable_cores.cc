#include "common/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/control_group.h"

namespace carrel {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// The next number in a file; none if there is none ("max", -1).
int64_t NextNumber(std::ifstream& file) {
  std::string word;
  int64_t number = 0;
  return file >> word && absl::SimpleAtoi(word, &number) && number > 0 ? number : kNone;
}

int64_t CoresOf(const std::string& folder, bool v2) {
  int64_t quota = kNone, period = kNone;  // microseconds
  if (v2) {
    std::ifstream file(absl::StrCat(folder, "/cpu.max"));
    quota = NextNumber(file);
    period = NextNumber(file);
  } else {
    std::ifstream quotas(absl::StrCat(folder, "/cpu.cfs_quota_us"));
    std::ifstream periods(absl::StrCat(folder, "/cpu.cfs_period_us"));
    quota = NextNumber(quotas);
    period = NextNumber(periods);
  }
  if (quota == kNone || period == kNone) return kNone;
  return std::max<int64_t>(1, quota / period);
}

// kNone where the kernel does not say, as on machines of more cores than a cpu_set_t has.
int64_t CoresOfAffinity() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return kNone;
  return std::max(1, CPU_COUNT(&cores));
}

}  // namespace

int64_t ControlGroupCores(const std::string& root, const std::string& membership) {
  return LeastOfControlGroups(root, membership, "cpu", CoresOf);
}

int UsableCores() {
  const int64_t machine = std::max(1u, std::thread::hardware_concurrency());
  return static_cast<int>(std::min(
      {machine, CoresOfAffinity(), ControlGroupCores("/sys/fs/cgroup", ControlGroupMembership())}));
}

}  // namespace carrel
