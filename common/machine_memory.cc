#include "common/machine_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

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

// Of the group and of those above it.
int64_t LeastUpwards(const std::string& root, std::string group, absl::string_view file) {
  int64_t least = kNone;
  for (;;) {
    least = std::min(least, LimitIn(absl::StrCat(root, group, "/", file)));
    const size_t slash = group.rfind('/');
    if (group.empty() || slash == std::string::npos) return least;
    group.resize(slash);
  }
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
  int64_t least = kNone;
  for (const absl::string_view line : absl::StrSplit(membership, '\n', absl::SkipEmpty())) {
    // "0::/group" under v2, "7:memory:/group" under v1.
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::string group = parts[2] == "/" ? "" : parts[2];
    if (parts[1].empty()) {
      least = std::min(least, LeastUpwards(root, group, "memory.max"));
    } else {
      for (const absl::string_view name : absl::StrSplit(parts[1], ',')) {
        if (name != "memory") continue;
        least = std::min(least, LeastUpwards(root + "/memory", group, "memory.limit_in_bytes"));
      }
    }
  }
  return least;
}

int64_t MachineMemoryBytes() {
  std::ifstream file("/proc/self/cgroup");
  std::stringstream membership;
  membership << file.rdbuf();
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return std::min({machine, ControlGroupMemoryBytes("/sys/fs/cgroup", membership.str()),
                   LimitOf(RLIMIT_AS), LimitOf(RLIMIT_DATA)});
}

}  // namespace carrel
