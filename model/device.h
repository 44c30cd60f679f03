// What:   which device runs a model's forward pass.
// Errors: InvalidArgument a name that is none; ResourceExhausted a bound on memory that does not
//         do; FailedPrecondition no CUDA in this build.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::model {

enum class Device : uint8_t { kCpu = 0, kCuda = 1 };

absl::StatusOr<Device> ParseDevice(absl::string_view name);  // "cpu", "cuda"

inline constexpr int64_t kAllGpuMemory = 0;  // no bound but the device's own

// Refused if `needed` device bytes exceed the bound that was set.
absl::Status CheckGpuMemory(int64_t needed, int64_t bound);

// What a program that was built without CUDA answers.
absl::Status BuiltWithoutCuda();

}  // namespace carrel::model
