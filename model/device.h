// What:   which device runs a model's forward pass.
// Errors: InvalidArgument a name that is none; ResourceExhausted a bound on memory that does not
//         do; FailedPrecondition no CUDA in this build.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::model {

enum class Device : uint8_t { kCpu = 0, kCuda = 1 };

absl::StatusOr<Device> ParseDevice(absl::string_view name);  // "cpu", "cuda"

inline constexpr int64_t kAllGpuMemory = 0;  // no bound but the device's own

// Refused if `needed` device bytes exceed the bound that was set.
absl::Status CheckGpuMemory(int64_t needed, int64_t bound);

// Device bytes that decoders of this process hold, counted as long as it lives. Movable; any thread.
class GpuReservation {
 public:
  explicit GpuReservation(int64_t bytes);
  GpuReservation() = default;
  ~GpuReservation();
  GpuReservation(GpuReservation&& other) noexcept : bytes_(std::exchange(other.bytes_, 0)) {}
  GpuReservation& operator=(GpuReservation&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  static int64_t all();  // of the process

 private:
  int64_t bytes_ = 0;
};

// What a program that was built without CUDA answers.
absl::Status BuiltWithoutCuda();

}  // namespace carrel::model
