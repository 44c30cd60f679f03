// What:   how many file descriptors this process may have.
// Errors: FailedPrecondition fewer than kLeastDescriptors.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace carrel {

// Below, a server would run out of them with its first clients.
inline constexpr int64_t kLeastDescriptors = 256;

// Raises the soft limit to the hard one and returns it.
absl::StatusOr<int64_t> RaiseDescriptorLimit();

}  // namespace carrel
