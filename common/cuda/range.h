// What: names a phase of the host's work for profilers (NVTX); costs nothing where none listens.
#pragma once

#include <nvtx3/nvToolsExt.h>

namespace carrel::cuda {

class Range {
 public:
  explicit Range(const char* name) { nvtxRangePushA(name); }
  ~Range() { nvtxRangePop(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace carrel::cuda
