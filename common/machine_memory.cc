#include "common/machine_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/control_group.h"

namespace carrel {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// The number in a file; none if there is no such file, or it says "max".
int64_t LimitIn(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  int64_t bytes = 0;
  return file >> word && absl::SimpleAtoi(word, &bytes) && bytes > 0 ? bytes : kNone;
}

int64_t LimitOf(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) return kNone;
  return limit.rlim_cur == RLIM_INFINITY
             ? kNone
             : static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, static_cast<rlim_t>(kNone)));
}

}  // namespace

int64_t ControlGroupMemoryBytes(const std::string& root, const std::string& membership) {
  return LeastOfControlGroups(root, membership, "memory", [](const std::string& folder, bool v2) {
    return LimitIn(absl::StrCat(folder, v2 ? "/memory.max" : "/memory.limit_in_bytes"));
  });
}

int64_t MachineMemoryBytes() {
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return std::min({machine, ControlGroupMemoryBytes("/sys/fs/cgroup", ControlGroupMembership()),
                   LimitOf(RLIMIT_AS), LimitOf(RLIMIT_DATA)});
}

}  // namespace carrel
