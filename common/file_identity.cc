#include "common/file_identity.h"

#include <sys/stat.h>

#include <cerrno>
#include <ctime>

#include "common/status.h"

namespace carrel {
namespace {

int64_t Nanoseconds(const timespec& time) {
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

}  // namespace

absl::Duration FileIdentity::Age() const {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return absl::Nanoseconds(Nanoseconds(now) - changed_ns);
}

absl::StatusOr<FileIdentity> IdentifyFile(int fd, absl::string_view what) {
  struct stat found;
  if (fstat(fd, &found) != 0) return ErrnoStatus(errno, absl::StrCat("stat ", what));
  return FileIdentity{static_cast<uint64_t>(found.st_dev), static_cast<uint64_t>(found.st_ino),
                      static_cast<int64_t>(found.st_size), Nanoseconds(found.st_mtim),
                      Nanoseconds(found.st_ctim)};
}

}  // namespace carrel
