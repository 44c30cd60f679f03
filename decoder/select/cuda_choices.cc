#include "decoder/select/cuda_choices.h"

#include "common/cuda/status.h"

namespace carrel::decoder {

absl::Status CudaChoices::Launch(const cuda::Stream& stream) const {
  RETURN_IF_CUDA_ERROR(kernels::CodeTopK(by_codes, stream.get()));
  RETURN_IF_CUDA_ERROR(kernels::RescoreRows(by_keys, stream.get()));
  return absl::OkStatus();
}

}  // namespace carrel::decoder
