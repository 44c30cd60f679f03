// In place of cuda_forward_pass.cc where CUDA is not built in.
#include "decoder/forward/forward_pass.h"
#include "model/device.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCudaForwardPass(const model::Checkpoint&,
                                                                 const OpenedContext&) {
  return model::BuiltWithoutCuda();
}

}  // namespace carrel::decoder
