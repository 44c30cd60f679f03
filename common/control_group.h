// What: the limits that control groups (cgroup v2 or v1) set to this process: its own group's and those of the
//       groups above it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"

namespace carrel {

// As /proc/self/cgroup has it; empty: there is none.
std::string ControlGroupMembership();

// The least that `limit` finds in the folders of the groups that `membership` (as above) names below `root`
// (as /sys/fs/cgroup) for `controller`; INT64_MAX: none. limit gives INT64_MAX where a folder sets none.
int64_t LeastOfControlGroups(const std::string& root, const std::string& membership,
                             absl::string_view controller,
                             absl::FunctionRef<int64_t(const std::string& folder, bool v2)> limit);

}  // namespace carrel
