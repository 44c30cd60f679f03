#include "common/descriptor_limit.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <vector>

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

absl::Status CheckFreeDescriptors(int64_t count) {
  std::vector<int> taken;
  absl::Status status;
  while (status.ok() && static_cast<int64_t>(taken.size()) < count) {
    const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
      taken.push_back(fd);
    } else {
      status = ErrnoStatus(errno, absl::StrCat("taking ", count, " descriptors"));
    }
  }
  for (const int fd : taken) close(fd);
  return status;
}

}  // namespace carrel
