// In place of cuda_forward.cc and cuda_accelerator.cc where CUDA is not built in.
#include "model/device.h"
#include "prefill/cuda_accelerator.h"
#include "prefill/layer_forward.h"

namespace carrel::prefill {

absl::Status CheckCudaForward(const model::ModelConfig&) { return model::BuiltWithoutCuda(); }

absl::StatusOr<std::unique_ptr<LayerForward>> MakeCudaForward(const model::Checkpoint&,
                                                              const ForwardPlan&, int64_t, int64_t,
                                                              int, ThreadPool*) {
  return model::BuiltWithoutCuda();
}

absl::StatusOr<std::unique_ptr<kvstore::Accelerator>> MakeCudaAccelerator(int64_t, bool) {
  return model::BuiltWithoutCuda();
}

int64_t CudaAcceleratorBytes(int64_t, bool) { return 0; }

void LeaveGpu() {}

}  // namespace carrel::prefill
