#include "common/control_group.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace carrel {

std::string ControlGroupMembership() {
  std::ifstream file("/proc/self/cgroup");
  std::stringstream membership;
  membership << file.rdbuf();
  return membership.str();
}

int64_t LeastOfControlGroups(const std::string& root, const std::string& membership,
                             absl::string_view controller,
                             absl::FunctionRef<int64_t(const std::string& folder, bool v2)> limit) {
  int64_t least = std::numeric_limits<int64_t>::max();
  // Of the group and of those above it.
  const auto upwards = [&](const std::string& from, std::string group, bool v2) {
    for (;;) {
      least = std::min(least, limit(absl::StrCat(from, group), v2));
      const size_t slash = group.rfind('/');
      if (group.empty() || slash == std::string::npos) return;
      group.resize(slash);
    }
  };
  for (const absl::string_view line : absl::StrSplit(membership, '\n', absl::SkipEmpty())) {
    // "0::/group" under v2, "7:cpu,cpuacct:/group" under v1.
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::string group = parts[2] == "/" ? "" : parts[2];
    if (parts[1].empty()) {
      upwards(root, group, true);
    } else {
      for (const absl::string_view name : absl::StrSplit(parts[1], ',')) {
        if (name == controller) upwards(absl::StrCat(root, "/", name), group, false);
      }
    }
  }
  return least;
}

}  // namespace carrel
