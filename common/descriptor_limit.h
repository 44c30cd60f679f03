// What:   how many file descriptors this process may have.
// Errors: FailedPrecondition fewer than kLeastDescriptors; as OutOfDescriptors (common/resource_status.h).
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace carrel {

// Below, a server would run out of them with its first clients.
inline constexpr int64_t kLeastDescriptors = 256;

// Raises the soft limit to the hard one and returns it.
absl::StatusOr<int64_t> RaiseDescriptorLimit();

// Whether so many more can be had now: for what ends the process where it finds none (gRPC).
absl::Status CheckFreeDescriptors(int64_t count);

}  // namespace carrel
