// What:   whether a file is still the one, with the bytes, that it was: device, inode, size and the
//         times of modification and change. The kernel sets the time of change at every write,
//         whoever writes, and no call sets it back.
// Edge:   the kernel's clock for files ticks every few ms: a write within a tick (kTick is above
//         any) of the one before bears the same time. A write through a shared mapping bears the
//         time of the first write to its page only, on some file systems (tmpfs) none.
// Cost:   some 0.3 us, no disk.   Threads: reentrant.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace carrel {

struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t modified_ns = 0;  // since 1970
  int64_t changed_ns = 0;

  bool operator==(const FileIdentity&) const = default;

  static constexpr absl::Duration kTick = absl::Milliseconds(20);
  // How long ago it was changed, by the system's clock; negative if that stands in the future.
  absl::Duration Age() const;
};

// Of an open file; `what` names it in errors.
absl::StatusOr<FileIdentity> IdentifyFile(int fd, absl::string_view what);

}  // namespace carrel
