// In place of cuda_rates.cc where CUDA is not built in.
#include "decoder/plan/rates.h"
#include "model/device.h"

namespace carrel::decoder {

absl::StatusOr<std::string> GpuName() { return model::BuiltWithoutCuda(); }
absl::StatusOr<int64_t> GpuMemory() { return model::BuiltWithoutCuda(); }
int64_t GpuModelBytes(const model::ModelConfig&, const DeviceConfig&, int64_t) { return 0; }
absl::Status MeasureCudaRates(const AttentionShape&, ThreadPool*, Rates&) {
  return model::BuiltWithoutCuda();
}

}  // namespace carrel::decoder
