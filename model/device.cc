#include "model/device.h"

#include <atomic>

#include "absl/strings/str_cat.h"

namespace carrel::model {
namespace {

std::atomic<int64_t> reserved{0};

}  // namespace

absl::StatusOr<Device> ParseDevice(absl::string_view name) {
  if (name == "cpu") return Device::kCpu;
  if (name == "cuda") return Device::kCuda;
  return absl::InvalidArgumentError(absl::StrCat("device=", name, " is none of cpu, cuda"));
}

absl::Status CheckGpuMemory(int64_t needed, int64_t bound) {
  if (bound == kAllGpuMemory || needed <= bound) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("gpu_memory=", bound, " is too little: ", needed, " bytes are needed"));
}

GpuReservation::GpuReservation(int64_t bytes) : bytes_(bytes) { reserved += bytes; }
GpuReservation::~GpuReservation() { reserved -= bytes_; }
int64_t GpuReservation::all() { return reserved; }

absl::Status BuiltWithoutCuda() {
  return absl::FailedPreconditionError(
      "device=cuda: this program was built without CUDA (./run build gpu)");
}

}  // namespace carrel::model
