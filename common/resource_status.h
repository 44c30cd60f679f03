// What: failures of what a process or a machine has too little of, told apart from those of a rate, a
//       queue or a quota of somebody's, which have the same code.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace carrel {

// ResourceExhausted of a disk or a quota: "disk full: message", with a payload of kDiskFullUrl. Trying
// again does not help its caller, other than a rate or a queue.
inline constexpr char kDiskFullUrl[] = "carrel/disk-full";
absl::Status MakeDiskFull(absl::string_view message);
// By the payload or, where a transport or the library's own Status dropped it, by the words.
bool IsDiskFull(const absl::Status& status);

// ResourceExhausted: this process has as many file descriptors as it may; names the limit.
absl::Status OutOfDescriptors(absl::string_view what);

}  // namespace carrel
