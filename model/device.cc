#include "model/device.h"

#include "absl/strings/str_cat.h"

namespace carrel::model {

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

absl::Status BuiltWithoutCuda() {
  return absl::FailedPreconditionError(
      "device=cuda: this program was built without CUDA (./run build gpu)");
}

}  // namespace carrel::model
