// In place of cuda_forward_pass.cc where CUDA is not built in.
#include "decoder/forward_pass.h"
#include "model/device.h"

namespace carrel::decoder {

absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCudaForwardPass(const model::Checkpoint&,
                                                                 const RetrievalConfig&,
                                                                 const DeviceConfig&,
                                                                 const v1::OpenReply&, StoreClient*,
                                                                 ThreadPool*) {
  return model::BuiltWithoutCuda();
}

}  // namespace carrel::decoder
