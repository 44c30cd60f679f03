// What: how many cores this process may use: those of the machine, less where its affinity (taskset, a
//       container's cpuset) or a control group's quota (a container's cpus=) allows fewer. More threads
//       than that stop each other: a spinning worker starves the thread that computes.
#pragma once

#include <cstdint>
#include <string>

namespace carrel {

// At least 1. Of a quota its whole cores: what goes beyond a quota is stopped for a tenth of a second.
int UsableCores();

// The least quota of the groups that `membership` names below `root` (common/control_group.h), whole cores,
// at least 1; INT64_MAX: none.
int64_t ControlGroupCores(const std::string& root, const std::string& membership);

}  // namespace carrel
