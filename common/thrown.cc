#include "common/thrown.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "common/shown.h"

namespace carrel {

absl::Status ThrownStatus(absl::string_view what, const char* thrown) {
  absl::Status status =
      absl::InternalError(absl::StrCat(what, ": an exception: ", Shown(thrown, 300)));
  std::fprintf(stderr, "carrel: %s\n", std::string(status.message()).c_str());
  return status;
}

absl::Status NoThreadStatus(absl::string_view what) {
  return absl::ResourceExhaustedError(absl::StrCat(
      what, ": no thread can be started: memory, or the limit of threads (ulimit -u), is used up"));
}

}  // namespace carrel
