#include "decoder/select/cuda_choices.h"

#include "common/cuda/status.h"
#include "common/status.h"

namespace carrel::decoder {

absl::Status CudaChoices::Launch(const cuda::Stream& stream) const {
  RETURN_IF_CUDA_ERROR(kernels::CodeTopK(by_codes, stream.get()));
  for (const auto& [selector, choice] : alone) {
    RETURN_IF_ERROR(selector->Enqueue(choice, stream));
  }
  RETURN_IF_CUDA_ERROR(kernels::RescoreRows(by_keys, stream.get()));
  return absl::OkStatus();
}

}  // namespace carrel::decoder
