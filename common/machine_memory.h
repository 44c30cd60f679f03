// What: how much memory this process may use: that of the machine, less where a control group
//       (cgroup v2 or v1, it or one above it) or a limit of the process (RLIMIT_AS, RLIMIT_DATA)
//       allows less.
#pragma once

#include <cstdint>
#include <string>

namespace carrel {

int64_t MachineMemoryBytes();

// The least limit of the groups that `membership` (as /proc/self/cgroup) names below `root` (as
// /sys/fs/cgroup); INT64_MAX: none.
int64_t ControlGroupMemoryBytes(const std::string& root, const std::string& membership);

}  // namespace carrel
