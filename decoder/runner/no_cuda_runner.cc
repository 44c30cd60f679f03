// In place of cuda_runner.cc where CUDA is not built in.
#include "decoder/runner/runner.h"
#include "model/device.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaSequence(const model::Checkpoint&,
                                                           const OpenedContext&) {
  return model::BuiltWithoutCuda();
}

}  // namespace carrel::decoder
