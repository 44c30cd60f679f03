#include "common/descriptor_limit.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "common/status.h"

namespace carrel {

absl::StatusOr<int64_t> RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return ErrnoStatus(errno, "limit of descriptors");
  if (limit.rlim_cur < limit.rlim_max) {
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = limit.rlim_max;
    // Refused where the kernel's own bound (fs.nr_open) was lowered since: what there was stays.
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  }
  const rlim_t most = static_cast<rlim_t>(std::numeric_limits<int32_t>::max());
  const auto descriptors = static_cast<int64_t>(std::min(limit.rlim_cur, most));
  if (descriptors < kLeastDescriptors) {
    return absl::FailedPreconditionError(
        absl::StrCat("file descriptors: the hard limit is ", descriptors, ", at least ",
                     kLeastDescriptors, " are needed (ulimit -Hn, or LimitNOFILE of a unit)"));
  }
  return descriptors;
}

}  // namespace carrel
