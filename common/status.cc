#include "common/status.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "common/resource_status.h"

namespace carrel {
namespace {

constexpr absl::string_view kDiskFullWords = "disk full: ";

}  // namespace

absl::Status Annotate(const absl::Status& status, absl::string_view prefix) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(prefix, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

absl::Status MakeDiskFull(absl::string_view message) {
  absl::Status status = absl::ResourceExhaustedError(
      absl::StrCat(absl::StrContains(message, kDiskFullWords) ? "" : kDiskFullWords, message));
  status.SetPayload(kDiskFullUrl, absl::Cord("1"));
  return status;
}

bool IsDiskFull(const absl::Status& status) {
  return absl::IsResourceExhausted(status) && (status.GetPayload(kDiskFullUrl).has_value() ||
                                               absl::StrContains(status.message(), kDiskFullWords));
}

absl::Status OutOfDescriptors(absl::string_view what) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return absl::ResourceExhaustedError(
      absl::StrCat(what, ": out of file descriptors: this process may have ",
                   static_cast<uint64_t>(limit.rlim_cur), " of them (ulimit -n)"));
}

absl::Status ErrnoStatus(int error_number, absl::string_view what) {
  std::string message = absl::StrCat(what, ": ", std::strerror(error_number));
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    case ENOSPC:
    case EDQUOT:
    case EFBIG:  // a limit on the size of files
      return MakeDiskFull(message);
    case EMFILE:
      return OutOfDescriptors(what);
    case ENOMEM:
    case ENFILE:
      return absl::ResourceExhaustedError(message);
    case EEXIST:
      return absl::AlreadyExistsError(message);
    default:
      return absl::UnavailableError(message);
  }
}

}  // namespace carrel
