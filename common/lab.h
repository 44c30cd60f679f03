// What:   whether this program has the lab: what stands in lab/ (methods, index kinds and options of papers that lose on
//         this project's own pages), which the build leaves out with -DCARREL_LAB=OFF.
// Errors: Unimplemented where it has not.
// Threads: any.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carrel {

bool HasLab();

// What: such as "method=hip". Ok where this program has the lab.
absl::Status CheckLab(absl::string_view what);

}  // namespace carrel
